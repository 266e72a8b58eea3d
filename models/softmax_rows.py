"""Rows of softmax attention for chosen queries, written out: patterns, soft-capping, learned sinks, hidden keys.

s_ts = cap tanh(scale q_t . k_s / cap) (Gemma 2); a learned sink logit is one more column, dropped after the softmax.
Keys hidden by hooks.knockout are no part of the softmax, which is thereby renormalised over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.knockout import Knockout
from kernels.attention import Band
from kernels.attention.bands import visible

ROWS = 256  # queries whose scores exist at a time


def weights(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    query_at: Int[Tensor, " T"],
    key_at: Int[Tensor, " S"],
    *,
    bands: tuple[Band, ...],
    scale: float,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
    hidden: Bool[Tensor, "B H T S"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """The probabilities, float32 (float64 for such queries); hidden keys hold 0, rows sum to 1 minus the sink's."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(work).mul(scale).unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)  # B G share T K
    scores = (grouped @ key.to(work).permute(0, 2, 3, 1).unsqueeze(2)).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(query_at, key_at, bands), float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sink_logits is None:
        return scores.softmax(-1)
    column = sink_logits.to(work)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def mixed(p: Float[Tensor, "B H T S"], value: Float[Tensor, "B S G V"]) -> Float[Tensor, "B T H V"]:
    """sum over s of p_ts v_s in value's dtype, each kv head serving its query heads."""
    grouped = p.to(value.dtype).unflatten(1, (value.shape[2], -1))
    return (grouped @ value.transpose(1, 2).unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def out_without(
    out: Float[Tensor, "B T H V"], value: Float[Tensor, "B S G V"], knockouts: Sequence[Knockout], *operands: Any,
    **settings: Any,
) -> Float[Tensor, "B T H V"]:  # fmt: skip
    """`out` with the rows that a knockout concerns made again without the hidden keys; the others keep their bits."""
    out = out.clone()
    for rows, touched, p in _rows_without(knockouts, *operands, **settings):
        new = mixed(p, value).to(out.dtype)
        out[:, rows] = torch.where(touched.transpose(1, 2)[..., None], new, out[:, rows])
    return out


def pattern_without(
    pattern: Float[Tensor, "B H T S"], knockouts: Sequence[Knockout], *operands: Any, **settings: Any
) -> Float[Tensor, "B H T S"]:
    """The same of the probabilities themselves."""
    pattern = pattern.clone()
    for rows, touched, p in _rows_without(knockouts, *operands, **settings):
        pattern[:, :, rows] = torch.where(touched[..., None], p.to(pattern.dtype), pattern[:, :, rows])
    return pattern


def _rows_without(
    knockouts: Sequence[Knockout], query: Float[Tensor, "B T H K"], key: Float[Tensor, "B S G K"], **settings: Any
) -> Iterator[tuple[Int[Tensor, " R"], Bool[Tensor, "B H R"], Float[Tensor, "B H R S"]]]:
    """(rows, which of them lose a key that they could see, their probabilities), ROWS at a time."""
    batch, length, heads = query.shape[:3]
    if key.shape[1] != length or any(len(own.spans) != batch for own in knockouts):
        raise ValueError(
            f"{length} queries, {key.shape[1]} keys, batch {batch}, spans of {[len(own.spans) for own in knockouts]} "
            "samples under a knockout; expected whole sequences without a cache, and one span for each sample."
        )
    at = torch.arange(length, device=query.device)
    asked = torch.stack([own.behind(at, length).any(0) for own in knockouts]).any(0).nonzero().flatten()
    for rows in asked.split(ROWS):
        hidden = torch.zeros(batch, heads, len(rows), length, dtype=torch.bool, device=query.device)
        for own in knockouts:
            hidden[:, list(own.heads)] |= (own.behind(rows, length)[..., None] & own.inside(at)[:, None])[:, None]
        touched = (hidden & visible(rows, at, settings["bands"])).any(-1)
        yield rows, touched, weights(query[:, rows], key, rows, at, hidden=hidden, **settings)
