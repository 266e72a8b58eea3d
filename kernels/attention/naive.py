"""attention and its statistics as a loop over queries in float64, the law the other forms are tested against.

p_t = softmax over visible s of (scale * q_t . k_s), a learned sink logit one more column that is dropped afterwards
o_t = sum over s of p_ts v_s        H_t = -sum over s of p_ts log p_ts        M_tn = sum over s in span n of p_ts
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention.bands import Band, visible_count
from kernels.attention.statistics import AttentionStatistics
from kernels.operands import working_dtype


def _rows(
    query: Tensor, key: Tensor, bands: tuple[Band, ...], scale: float, sink_logits: Tensor | None, rows: list[int]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """For each row: its visible keys, their scores [B, H, keys] and the lse [B, H] with the learned sink."""
    share = query.shape[2] // key.shape[2]
    first = key.shape[1] - query.shape[1]
    query, key = query.double(), key.double().repeat_interleave(share, 2)
    for row in rows:
        t = first + row
        seen = [s for s in range(t + 1) if all(w is None or t - s < w or s < sinks for w, sinks in bands)]
        scores = scale * torch.einsum("bhk,bshk->bhs", query[:, row], key[:, seen])
        columns = scores
        if sink_logits is not None:
            sink = sink_logits.double()[None, :, None].expand(*scores.shape[:2], 1)
            columns = torch.cat([scores, sink], -1)
        yield seen, scores, columns.logsumexp(-1)


def attention_naive(
    query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...], scale: float, sink_logits: Tensor | None = None
) -> Tensor:
    heads = value.double().repeat_interleave(query.shape[2] // key.shape[2], 2)
    out = []
    for seen, scores, lse in _rows(query, key, bands, scale, sink_logits, list(range(query.shape[1]))):
        out.append(torch.einsum("bhs,bshv->bhv", (scores - lse[..., None]).exp(), heads[:, seen]))
    return torch.stack(out, 1).to(value.dtype)


def statistics_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    rows: Tensor | None,
) -> AttentionStatistics:
    """Log probabilities, not probabilities, go into the entropy: a probability of 0 adds exactly 0."""
    dtype = working_dtype(query, key, sink_logits)
    chosen = list(range(query.shape[1])) if rows is None else rows.tolist()
    lses, entropies, tops, places, masses = [], [], [], [], []
    for seen, scores, lse in _rows(query, key, bands, scale, sink_logits, chosen):
        log_p = scores - lse[..., None]
        p = log_p.exp()
        top, place = scores.max(-1)
        at = torch.tensor(seen, device=query.device)
        lses.append(lse)
        entropies.append(-(p * log_p).sum(-1))
        tops.append(top)
        places.append(at[place])
        if spans is not None:
            inside = (at >= spans[..., :1]) & (at < spans[..., 1:])  # [B, N, keys]
            masses.append(torch.einsum("bhs,bns->bhn", p, inside.double()))
    lse, sink_mass = torch.stack(lses, -1), None
    if sink_logits is not None:
        sink_mass = (sink_logits.double()[None, :, None] - lse).exp().to(dtype)
    out = None
    if value is not None and rows is None:
        out = attention_naive(query, key, value, bands, scale, sink_logits)
    at = torch.tensor(chosen, device=query.device) + (key.shape[1] - query.shape[1])
    return AttentionStatistics(
        out,
        lse.to(dtype),
        torch.stack(entropies, -1).to(dtype),
        torch.stack(tops, -1).to(dtype),
        torch.stack(places, -1),
        sink_mass,
        torch.stack(masses, 2).to(dtype) if spans is not None else None,
        visible_count(at, bands),
    )
