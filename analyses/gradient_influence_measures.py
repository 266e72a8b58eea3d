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

CPU_BYTES = 4e9
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
    vectors: bool = False,
    keep_gb: float | None = None,
) -> dict[str, np.ndarray]:
    """norm [N, T] and score [N], with `layers` norms [N, L, T] at every block's input, with `vectors` the gradient
    [N, T, D] itself; fp32.

    Column d is distance d from the last position read; a BOS is the last column. `through` "full" or "efficient":
    no gradient passes the mixers of the other group. `keep_gb`: see Config. InputError naming the text whose gradient
    is not finite.
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
                    vectors=vectors,
                    keep_bytes=1e9 * keep_gb if keep_gb is not None else _spare_bytes(model.device),
                )
            )
        except ValueError as error:
            raise InputError(f"texts {', '.join(names[first:last])}: {error}") from error
    return _joined(found)


def _joined(found: Sequence[Any]) -> dict[str, np.ndarray]:
    """The batches one behind the other, on the CPU, by name; what was not asked for is not there."""
    parts = {field: [getattr(part, field) for part in found] for field in gradient.GradientInfluence._fields}
    return {name: torch.cat(values).float().cpu().numpy() for name, values in parts.items() if values[0] is not None}


def _spare_bytes(device: torch.device) -> float:
    """What activations may take: the other half is left to the block at work and to whoever shares the device."""
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) / 2


def outputs_of(model: Any, group: str) -> list[str]:
    """Hook points of the outputs (hook_z) of all full or of all efficient mixers. InputError for a mixer without one
    (of a Hugging Face family whose code cannot be reached there)."""
    names = []
    for layer in model.layers:
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if (path.kind == "full") == (group == "full"):
                point = getattr(mixer, "hook_z", None)
                if point is None:
                    which = f"layers.{layer.index} ({path.kind})"
                    raise InputError(f"{which} has no hook point at its mixer's output; leave out --groups")
                names.append(point.name)
    return names


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
