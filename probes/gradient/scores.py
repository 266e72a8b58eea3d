"""The scalar s whose gradient is taken, from the final hidden states at the target positions only.

    log_prob      mean over targets of log p(the token that follows)
    logit_sum     mean over targets of the sum of all logits (the paper's)
    argmax_logit  the largest entry of the targets' mean logits (the released script's alternative)

log_prob is the default because logit_sum cannot change the prediction: softmax ignores a constant added to all logits.
No logits are made but at the targets, and none at all for logit_sum where the unembedding is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from probes.gradient.frozen import wide

Score = Literal["log_prob", "logit_sum", "argmax_logit"]
SCORES: tuple[str, ...] = get_args(Score)
CHUNK = 64  # target positions whose logits exist at a time
CENTRED = 0.05  # norm of the rows' sum / that of independent rows; centring in bfloat16 leaves about 0.02


def score_function(
    model: Any, score: Score, targets: Int[Tensor, " P"], following: Int[Tensor, "B P"] | None
) -> Callable[[Float[Tensor, "B T D"]], Float[Tensor, " B"]]:
    """final_hidden -> s per sample, which raises ValueError for logit_sum of a centred unembedding."""
    if score == "log_prob":
        assert following is not None
        return partial(_log_prob, model, targets, following)
    return partial(_argmax_logit if score == "argmax_logit" else _logit_sum, model, targets)


def _log_prob(model: Any, targets: Tensor, following: Tensor, hidden: Tensor) -> Float[Tensor, " B"]:
    def chosen(rows: Tensor, tokens: Tensor) -> Tensor:
        log_p = wide(model.unembed(rows)).log_softmax(-1)
        return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).sum(1)

    return _in_chunks(chosen, hidden, targets, following) / len(targets)


def _logit_sum(model: Any, targets: Tensor, hidden: Tensor) -> Float[Tensor, " B"]:
    direction = _sum_direction(model, hidden.shape[-1])
    if direction is not None:
        return (wide(hidden[:, targets]) @ direction).mean(1)

    def total(rows: Tensor) -> Tensor:
        return wide(model.unembed(rows)).sum((1, 2))

    return _in_chunks(total, hidden, targets) / len(targets)


def _argmax_logit(model: Any, targets: Tensor, hidden: Tensor) -> Float[Tensor, " B"]:
    def total(rows: Tensor) -> Tensor:
        return wide(model.unembed(rows)).sum(1)

    mean = _in_chunks(total, hidden, targets) / len(targets)
    return mean.gather(-1, mean.argmax(-1, keepdim=True)).squeeze(-1)


def _in_chunks(function: Callable[..., Tensor], hidden: Tensor, targets: Tensor, *columns: Tensor) -> Tensor:
    """The sum of function over chunks of targets, recomputed in backward: memory does not grow with their number."""
    total = None
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        operands = (hidden[:, targets[part]], *(column[:, part] for column in columns))
        value = checkpoint(function, *operands, use_reentrant=False, preserve_rng_state=False)
        total = value if total is None else total + value
    assert total is not None
    return total


@torch.no_grad()
def _sum_direction(model: Any, width: int) -> Float[Tensor, " D"] | None:
    """The sum of the unembedding's rows, from its gradient; None where it is not linear (soft-capping).

    Hidden states far larger than real ones tell: a cap of 30 bends logits of 300, not those of a small probe. Powers
    of two scale a linear map without rounding.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, width, generator=generator).to(model.device, model.dtype)
    origin = wide(model.unembed(torch.zeros_like(probe)))  # the bias of an unembedding that has one
    logits = wide(model.unembed(probe)) - origin
    size = 2.0 ** min(12, 12 - math.frexp(float(logits.abs().max()))[1])  # logits of 4000 if float16 (65504) allows
    enlarged = wide(model.unembed(probe * size)) - origin
    if (enlarged - size * logits).abs().max() > 1e-2 * size * logits.abs().max():
        return None
    with torch.enable_grad():
        start = torch.zeros(1, width, device=model.device, dtype=model.dtype, requires_grad=True)
        (direction,) = torch.autograd.grad(model.unembed(start).sum(), start)
    if direction.norm() < CENTRED * (logits.shape[-1] * logits.pow(2).mean()).sqrt():
        raise ValueError(
            "score is 'logit_sum' and the unembedding is centred: its rows sum to nothing, so the sum of the logits "
            "has no gradient. Expected an unembedding that is not centred; use score='log_prob'."
        )
    return wide(direction[0])
