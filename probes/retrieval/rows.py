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
    visible: Bool[Tensor, "R S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> AttentionRows:
    """softmax over visible s of scale q_r . k_s; query r stands at positions[r] of the S keys, after its rotation.

    bands are (window, sinks): keys of all of them are visible that lie in the last `window` (self included; None: all)
    or among the first `sinks`. `visible` is visible_keys(positions, S, bands), for callers that have it already. scale
    None is K ** -0.5. softcap c takes scores x to c tanh(x / c). float32, or float64 if query is.
    """
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if visible is None:
        visible = visible_keys(positions.to(key.device), key.shape[1], bands)
    # the queries that share a kv head are rows of one matrix: broadcasting over them would copy the keys for each
    grouped = query.to(wide).mul(scale).unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)  # B G share R K
    scores = grouped.flatten(2, 3) @ key.to(wide).permute(0, 2, 3, 1)
    scores = scores.view(len(query), query.shape[2], *visible.shape)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is None:
        return AttentionRows(scores.softmax(-1), visible, None)
    column = sink_logits.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat([scores, column], -1).softmax(-1)
    return AttentionRows(p[..., :-1], visible, p[..., -1])


def visible_keys(
    positions: Int[Tensor, " R"], n_keys: int, bands: Sequence[tuple[int | None, int]] = ()
) -> Bool[Tensor, "R S"]:
    """Which of the first n_keys positions each query may attend to: the past and itself, inside every band."""
    at, s = positions[:, None], torch.arange(n_keys, device=positions.device)[None]
    visible = s <= at
    for window, sinks in bands:
        if window is not None:
            visible = visible & ((at - s < window) | (s < sinks))
    return visible


def inside_spans(spans: Int[Tensor, "B N 2"], n_keys: int) -> Bool[Tensor, "B N S"]:
    """Whether a key lies in the half-open token range [first, stop)."""
    s = torch.arange(n_keys, device=spans.device)
    return (s >= spans[..., :1]) & (s < spans[..., 1:])


def span_mass(p: Float[Tensor, "B H R S"], spans: Int[Tensor, "B N 2"]) -> Float[Tensor, "B H R N"]:
    """Weight on the keys of each half-open token range [first, stop) of its sample."""
    return weight_inside(p, inside_spans(spans.to(p.device), p.shape[-1]).to(p.dtype))


def weight_inside(p: Float[Tensor, "B H R S"], inside: Float[Tensor, "B N S"]) -> Float[Tensor, "B H R N"]:
    """The sum of p over the keys whose indicator is 1."""
    return torch.einsum("bhrs,bns->bhrn", p, inside)


def entropy(p: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """-sum p log p in nats; 0 log 0 = 0 without an epsilon, so a one-hot row gives exactly 0.

    Rows that sum to 1 - pi (learned sinks) are taken as they are: the sink's own term -pi log pi is not included.
    """
    return -torch.special.xlogy(p, p).sum(-1)


def normalised_entropy(h: Float[Tensor, "*rows"], visible: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """h / log(number of visible keys): 0 for one key, 1 for all alike. With a single visible key 0/0: NaN."""
    return h / log_count(visible).to(h.dtype)


def log_count(visible: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """log(number of visible keys), float64; NaN where it is one, so that 0 / it is undefined."""
    return torch.where(visible > 1, visible.double().log(), torch.nan)
