"""|| ds / de_{t-d} ||_2 per sample and distance, by one backward through the network's activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.gradient.frozen import frozen, norm_over_features, recomputed, stopped, watched
from probes.gradient.scores import SCORES, Score, score_function


class GradientInfluence(NamedTuple):
    """One row per sample, on the model's device; column d of a norm is distance d from the last position read from."""

    norm: Float[Tensor, "B T"]
    """|| ds / de_{t-d} ||_2, t = T - 1: column 0 is the last token itself."""
    score: Float[Tensor, " B"]
    """s itself (nats for log_prob)."""
    layers: Float[Tensor, "B L T"] | None
    """The same at the input of every block (blocks.N.hook_resid_pre), if asked for; layer 0 equals `norm`."""
    gradient: Float[Tensor, "B T D"] | None
    """ds / de_{t-d} itself, in the model's dtype, if asked for."""


def gradient_influence(
    model: Any,
    input_ids: Int[Tensor, "B S"],
    *,
    score: Score = "log_prob",
    n_targets: int = 20,
    targets: Sequence[int] | None = None,
    stop_at: Iterable[str] = (),
    layers: bool = False,
    vectors: bool = False,
    keep_bytes: float = 0.0,
) -> GradientInfluence:
    """How strongly the input embedding at each distance acts on the prediction, for each sample of the batch.

    s is the mean over `targets` (positions, counted from 0), or over the last n_targets positions; see
    probes.gradient.scores. With log_prob every position predicts the token after it, so the last of the S tokens is
    only predicted and T = S - 1 are read; with the others T = S. Samples do not touch each other. Embeddings are the
    output of the model's own embedding module (scaled, where the family scales there).

    `model` needs embed, final_hidden (of embeddings), unembed, device, dtype and layers with their `block`; `stop_at`
    names hook points that no gradient passes (the mixer outputs of one group: what is left flows through the other and
    the residual stream). Each block runs again in backward, in eval mode too: activations of one block at a time, for
    about a third more time. Blocks whose activations fit into `keep_bytes` (on each device) keep them instead; math.inf
    keeps all. Numbers do not depend on it. Norms are fp32. ValueError for bad arguments, and for a gradient that is not
    finite, naming the sample and, with layers=True, the layer.
    """
    read = input_ids[:, :-1] if score == "log_prob" else input_ids
    where = _checked_targets(input_ids, read.shape[1], score, n_targets, targets).to(input_ids.device)
    following = input_ids[:, where + 1] if score == "log_prob" else None
    if not keep_bytes >= 0:
        raise ValueError(f"keep_bytes is {keep_bytes}; expected 0 (all blocks run again) or more, math.inf for all.")
    gradient, scores, inputs = _backward(model, read, score, where, following, list(stop_at), layers, keep_bytes)
    norm = norm_over_features(gradient)
    _require_finite(norm, inputs)
    resolved = None if inputs is None else torch.stack([_reached(x, norm) for x in inputs], 1).flip(-1)
    return GradientInfluence(norm.flip(-1), scores.detach(), resolved, gradient.flip(1) if vectors else None)


def _backward(
    model: Any, read: Tensor, score: Score, where: Tensor, following: Tensor | None, stop_at: list[str], layers: bool,
    keep_bytes: float,
) -> tuple[Tensor, Tensor, list[Tensor | None] | None]:  # fmt: skip
    """Gradient [B, T, D] in the order of time, scores [B], and the norms at block inputs."""
    blocks = [layer.block for layer in model.layers]
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(frozen(model))
        of_hidden = score_function(model, score, where, following)
        embedded = model.embed(read).detach().requires_grad_()
        if stop_at:
            stack.enter_context(stopped(model, stop_at))
        inputs = stack.enter_context(watched(blocks)) if layers else None
        if keep_bytes < math.inf:
            stack.enter_context(recomputed(blocks, bool(stop_at), keep_bytes))
        scores = of_hidden(model.final_hidden(embedded))
        (gradient,) = torch.autograd.grad(scores.sum(), embedded)
    return gradient, scores, inputs


def _reached(layer: Tensor | None, norm: Tensor) -> Tensor:
    """A block that no gradient enters has none: all paths through it are stopped."""
    return torch.zeros_like(norm) if layer is None else layer


def _checked_targets(
    input_ids: Tensor, length: int, score: str, n_targets: int, targets: Sequence[int] | None
) -> Int[Tensor, " P"]:
    if score not in SCORES:
        raise ValueError(f"score is {score!r}; expected one of {', '.join(SCORES)}.")
    if input_ids.ndim != 2 or length < 1:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; expected [B, S] with at least "
            f"{'2 tokens, one to read and one to predict' if score == 'log_prob' else '1 token'}."
        )
    if targets is None:
        if not 1 <= n_targets <= length:
            raise ValueError(
                f"n_targets is {n_targets} for {length} positions read; expected 1 to {length}. "
                "Pass longer texts, or fewer targets."
            )
        return torch.arange(length - n_targets, length)
    if not len(targets) or min(targets) < 0 or max(targets) >= length:
        raise ValueError(
            f"targets is {list(targets)[:8]}; expected positions from 0 to {length - 1}, at least one"
            f"{' (the last token is only predicted)' if score == 'log_prob' else ''}."
        )
    return torch.as_tensor(list(targets), dtype=torch.long)


def _require_finite(norm: Tensor, inputs: list[Tensor | None] | None) -> None:
    if bool(norm.isfinite().all()):
        return
    sample = int((~norm.isfinite()).any(1).nonzero()[0])
    if inputs is None:
        where = "pass layers=True to see in which layer"
    else:
        bad = [index for index, x in enumerate(inputs) if x is not None and not bool(x[sample].isfinite().all())]
        where = f"it is lost in block {max(bad, default=0)}"
    raise ValueError(f"the gradient of sample {sample} is not finite; {where}.")
