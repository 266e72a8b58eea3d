"""What one condition does to one model: losses on documents, needle accuracy, and each mixer's change of output."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hooks
from analyses.conditions import Condition
from analyses.evaluation import Encoded
from models.errors import InputError
from probes.long_ppl import token_losses
from probes.niah import NIAHSample, accuracy

BUCKETS = 8
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131_072}


def document_losses(model: Any, condition: Condition, document: Encoded, context: int) -> dict[str, Any]:
    """Sums and means in nats: key_loss (sum over key tokens), matched_loss (mean), loss (mean), bucket_loss [BUCKETS].

    The floor knows only key and matched tokens, each from the last w tokens before it; the rest is NaN there.
    """
    if condition.group == "floor":
        chosen = np.concatenate((document.key, document.matched))
        losses = np.full(len(document.ids), np.nan)
        losses[chosen] = _floor_losses(model, torch.from_numpy(document.ids), chosen, condition.window)
        _check_finite(losses, chosen, document, condition)
    else:
        ids = torch.from_numpy(document.ids)[None].to(model.device)
        with condition.applied(model):
            scored = token_losses(model, ids, range(1, ids.shape[1]), chunk=1024)[0]
        losses = np.concatenate(([np.nan], scored.double().cpu().numpy()))
        _check_finite(losses, np.arange(1, len(losses)), document, condition)
    bucket = np.minimum(np.arange(len(losses)) * BUCKETS // context, BUCKETS - 1)
    by_bucket = [losses[1:][bucket[1:] == b] for b in range(BUCKETS)]
    return {
        "key_loss": float(losses[document.key].sum()),
        "matched_loss": _mean(losses[document.matched]),
        "loss": _mean(losses[1:]),
        "bucket_loss": [_mean(values) for values in by_bucket],
    }


def _check_finite(losses: np.ndarray, positions: np.ndarray, document: Encoded, condition: Condition) -> None:
    """NaN means not measured: a model that computes NaN must not pass for that."""
    bad = positions[~np.isfinite(losses[positions])]
    if len(bad):
        raise InputError(
            f"condition {condition.label!r}, document {document.name!r}: the loss of token {bad[0]} is "
            f"{losses[bad[0]]}; expected a finite number: check the checkpoint's weights and --dtype"
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _floor_losses(model: Any, ids: Tensor, positions: np.ndarray, window: int) -> np.ndarray:
    """Loss of each token when the model is given only the `window` tokens before it (all of them where fewer exist)."""
    losses = np.empty(len(positions))
    for width in np.unique(np.minimum(positions, window)):
        rows = np.flatnonzero(np.minimum(positions, window) == width)
        size = max(1, _budget(model) // int(width))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            batch = torch.stack([ids[p - width : p + 1] for p in positions[part]]).to(model.device)
            losses[part] = token_losses(model, batch, [int(width)])[:, 0].double().cpu().numpy()
    return losses


@torch.no_grad()
def prompt_accuracy(model: Any, condition: Condition, samples: Sequence[NIAHSample]) -> list[tuple[bool, float]]:
    """(all digits correct, share of digits correct) of each prompt, under teacher forcing."""
    if condition.group == "floor":
        return [_floor_accuracy(model, sample, condition.window) for sample in samples]
    results = []
    size = max(1, _budget(model) // len(samples[0].input_ids))
    with condition.applied(model):
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            batch = torch.from_numpy(np.stack([sample.input_ids for sample in part]).astype(np.int64))
            hidden = model.final_hidden(batch[:, :-1].to(model.device))
            for row, sample in zip(hidden, part, strict=True):
                first, last = sample.answer_span
                predicted = model.unembed(row[first - 1 : last - 1]).argmax(-1).cpu()
                score = accuracy(predicted, sample)
                results.append((score.all_correct, score.per_digit))
    return results


def _floor_accuracy(model: Any, sample: NIAHSample, window: int) -> tuple[bool, float]:
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))
    width = min(window, sample.answer_span[0])
    batch = torch.stack([ids[p - width : p] for p in range(*sample.answer_span)])
    hidden = model.final_hidden(batch.to(model.device))[:, -1]
    return tuple(accuracy(model.unembed(hidden).argmax(-1).cpu(), sample))  # type: ignore[return-value]


@torch.no_grad()
def layer_effects(model: Any, groups: Sequence[str], window: int, document: Encoded) -> dict[str, dict[int, float]]:
    """{group: {layer: ||o - o_w|| / ||o||}} of each mixer of a group on the input it has in the unrestricted model.

    0 for a mixer that puts out nothing, restricted or not (0/0). One forward pass serves all groups.
    """
    with ExitStack() as stack:
        effects = {group: stack.enter_context(hooks.mixer_effect(model, group, window=window)) for group in groups}
        model.final_hidden(torch.from_numpy(document.ids)[None].to(model.device))
    return {
        group: {layer: 0.0 if np.isnan(values[0]) else values[0] for layer, values in effect.items()}
        for group, effect in effects.items()
    }


def _budget(model: Any) -> int:
    return TOKENS_PER_BATCH[model.device.type]
