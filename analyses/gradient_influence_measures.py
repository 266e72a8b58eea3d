"""What one model does to a batch of texts: influence by distance, and the loss when only the last tokens are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from analyses.checkpoints import batches
from models.errors import InputError
from probes import gradient
from probes.long_ppl import token_losses

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16_384}
GROUPS = ("full", "efficient")


def influence(
    model: Any,
    ids: Int[np.ndarray, "N S"],
    names: Sequence[str],
    *,
    score: gradient.Score,
    n_targets: int,
    through: str | None = None,
    layers: bool = False,
) -> dict[str, np.ndarray]:
    """norm [N, T] and score [N], and with `layers` norms [N, L, T] at every block's input, fp32.

    Column d is distance d from the last position read; a BOS is the last column. `through` "full" or "efficient":
    no gradient passes the mixers of the other group. InputError naming the text whose gradient is not finite.
    """
    stop_at = [] if through is None else outputs_of(model, GROUPS[1 - GROUPS.index(through)])
    found: list[Any] = []
    for first, last in batches(len(ids), _size(model, ids)):
        rows = torch.from_numpy(ids[first:last]).to(model.device)
        try:
            found.append(
                gradient.gradient_influence(
                    model,
                    rows,
                    score=score,
                    n_targets=n_targets,
                    stop_at=stop_at,
                    layers=layers,
                )
            )
        except ValueError as error:
            raise InputError(f"texts {', '.join(names[first:last])}: {error}") from error
    arrays = {"norm": torch.cat([part.norm for part in found]), "score": torch.cat([part.score for part in found])}
    if layers:
        arrays["layers"] = torch.cat([part.layers for part in found])
    return {name: values.float().cpu().numpy() for name, values in arrays.items()}


def outputs_of(model: Any, group: str) -> list[str]:
    """Hook points of the outputs (hook_z) of all full or of all efficient mixers of a native model."""
    return [
        mixer.hook_z.name
        for layer in model.layers
        for path, mixer in zip(layer.paths, layer.mixers, strict=True)
        if (path.kind == "full") == (group == "full")
    ]


@torch.no_grad()
def losses_of_last(
    model: Any, ids: Int[np.ndarray, "N S"], names: Sequence[str], n_targets: int, window: int | None, bos: bool
) -> Float[np.ndarray, " N"]:
    """Mean loss (nats) of the last `n_targets` tokens, given all tokens before them or the last `window` read.

    The window is counted from the position that predicts the last token, as distances are with log_prob (with the other
    scores the last position read lies one further): what lies at distance `window` or beyond is not given, so the first
    of the targets sees n_targets - 1 tokens less. A BOS stays in front.
    """
    if window is not None:
        kept = ids[:, -window - 1 :]
        ids = np.concatenate((ids[:, :1], kept), axis=1) if bos and kept.shape[1] < ids.shape[1] else kept
    positions = range(ids.shape[1] - n_targets, ids.shape[1])
    losses = []
    for first, last in batches(len(ids), _size(model, ids)):
        rows = torch.from_numpy(np.ascontiguousarray(ids[first:last])).to(model.device)
        losses.append(token_losses(model, rows, positions).double().mean(1).cpu().numpy())
    values = np.concatenate(losses)
    if not np.isfinite(values).all():
        bad = names[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise InputError(f"text {bad!r}: the loss is not finite; check the checkpoint's weights and --dtype")
    return values


def _size(model: Any, ids: np.ndarray) -> int:
    return max(1, TOKENS_PER_BATCH[model.device.type] // ids.shape[1])
