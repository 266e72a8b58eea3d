"""Rows of the attention pattern for chosen queries, and what is read off them; O(R S) per head, float32 sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class AttentionRows(NamedTuple):
    """Probabilities of R queries over all S keys; hidden keys hold exactly 0."""

    p: Float[Tensor, "B H R S"]
    visible: Bool[Tensor, "R S"]
    sink_mass: Float[Tensor, "B H R"] | None
    """Weight of learned sink logits; p then sums to 1 minus it. None without learned sinks."""


def attention_rows(
    query: Float[Tensor, "B R H K"],
    key: Float[Tensor, "B S G K"],
    positions: Int[Tensor, " R"],
    *,
    bands: Sequence[tuple[int | None, int]] = (),
    scale: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> AttentionRows:
    """softmax over visible s of scale q_r . k_s; query r stands at positions[r] of the S keys, after its rotation.

    bands are (window, sinks): keys of all of them are visible that lie in the last `window` (self included; None: all)
    or among the first `sinks`. scale None is K ** -0.5. float32, or float64 if query is.
    """
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = key.shape[2]
    grouped = query.to(wide).mul(scale).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # B G share R K
    scores = (grouped @ key.to(wide).permute(0, 2, 3, 1).unsqueeze(2)).flatten(1, 2)
    at, s = positions.to(key.device)[:, None], torch.arange(key.shape[1], device=key.device)[None]
    visible = s <= at
    for window, sinks in bands:
        if window is not None:
            visible = visible & ((at - s < window) | (s < sinks))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is None:
        return AttentionRows(scores.softmax(-1), visible, None)
    column = sink_logits.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat([scores, column], -1).softmax(-1)
    return AttentionRows(p[..., :-1], visible, p[..., -1])


def span_mass(p: Float[Tensor, "B H R S"], spans: Int[Tensor, "B N 2"]) -> Float[Tensor, "B H R N"]:
    """Weight on the keys of each half-open token range [first, stop) of its sample."""
    s = torch.arange(p.shape[-1], device=p.device)
    spans = spans.to(p.device)
    inside = (s >= spans[..., :1]) & (s < spans[..., 1:])
    return torch.einsum("bhrs,bns->bhrn", p, inside.to(p.dtype))


def entropy(p: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """-sum p log p in nats; 0 log 0 = 0 without an epsilon, so a one-hot row gives exactly 0.

    Rows that sum to 1 - pi (learned sinks) are taken as they are: the sink's own term -pi log pi is not included.
    """
    return -torch.special.xlogy(p, p).sum(-1)


def normalised_entropy(h: Float[Tensor, "*rows"], visible: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """h / log(number of visible keys): 0 for one key, 1 for all alike. With a single visible key 0/0: NaN."""
    return torch.where(visible > 1, h / visible.to(h.dtype).log(), torch.nan)
