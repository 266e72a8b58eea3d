"""Statistics of attention, and attention with learned sinks, in torch: blocks of queries with an explicit softmax.

With m the largest of the scores s_j and of the sink logit z: x_j = s_j - m, l = sum exp x_j [+ exp(z - m)],
log p_j = x_j - log l. Accumulation in float32 (float64 for float64 operands). Only one block's scores exist at a time,
in backward too, where each block is computed again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.attention.bands import Band, binding, visible, visible_count
from kernels.attention.precision import common_dtype
from kernels.attention.statistics import AttentionStatistics
from kernels.operands import working_dtype

SCORES = 2**23  # scores held at once, 32 MiB in float32
LEAST_ROWS = 16


def _block(
    q: Tensor,  # [B, G, H // G, rows, K]
    k: Tensor,  # [B, G, keys, K]
    v: Tensor | None,
    query_at: Tensor,
    key_at: Tensor,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None,  # [G, H // G]
    spans: Tensor | None,  # [B, N, 2]
    statistics: bool,
) -> tuple[Tensor | None, ...]:
    """out, lse, entropy, max, argmax, sink mass, mass of one block of rows; [B, G, H // G, rows] each."""
    seen = visible(query_at, key_at, bands)
    scores = (q * scale) @ k.unsqueeze(2).mT
    top, place = scores.masked_fill(~seen, float("-inf")).max(-1)
    base = top.detach()  # the result does not depend on it
    sink = None if sink_logits is None else sink_logits[None, :, :, None]
    if sink is not None:
        base = torch.maximum(base, sink.detach())
    x = (scores - base[..., None]).masked_fill(~seen, 0.0)
    e = x.exp() * seen
    total = e.sum(-1) if sink is None else e.sum(-1) + (sink - base).exp()
    p = e / total[..., None]
    out = None if v is None else p @ v.unsqueeze(2)
    if not statistics:
        return out, None, None, None, None, None, None
    log_total = total.log()
    entropy = -(p * (x - log_total[..., None])).sum(-1)
    sink_mass = None if sink is None else (sink - base).exp() / total
    mass = None
    if spans is not None:
        inside = ((key_at >= spans[..., :1]) & (key_at < spans[..., 1:])).to(p.dtype)  # [B, N, keys]
        mass = p @ inside[:, None, None].mT
    return out, base + log_total, entropy, top, key_at[place], sink_mass, mass


def _key_places(first: int, last: int, bands: tuple[Band, ...], device: torch.device) -> tuple[Tensor, int, int]:
    """Positions of the keys that queries first..last may see: the first `sinks` and then [low, last]."""
    window = min([last + 1] + [band.window for band in bands if band.window is not None])
    low = max(0, first - window + 1)
    sinks = min(low, max([0] + [band.sinks for band in bands if band.window is not None]))
    at = torch.arange(last + 1, device=device)
    return torch.cat([at[:sinks], at[low:]]), sinks, low


def by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    rows: Tensor | None,
    statistics: bool,
) -> list[Tensor | None]:
    """The seven results of `_block` for all rows: out [B, T, H, V], then [B, H, R] each and mass [B, H, R, N].

    Chosen rows meet all keys; without a choice each block meets only the keys its bands let it see.
    """
    work = working_dtype(query, key, value, sink_logits)
    b, t, h, _ = query.shape
    s, g = key.shape[1:3]
    offset, device = s - t, query.device
    chosen = query if rows is None else query.index_select(1, rows)
    q = chosen.transpose(1, 2).unflatten(1, (g, h // g)).to(work)
    k = key.transpose(1, 2).to(work)
    v = None if value is None else value.transpose(1, 2).to(work)
    sinks = None if sink_logits is None else sink_logits.to(work).unflatten(0, (g, h // g))
    span = None if spans is None else spans.to(device).expand(b, -1, 2)
    count = max(LEAST_ROWS, min(256, SCORES // (b * h * s)))
    parts: list[tuple[Tensor | None, ...]] = []
    for at in range(0, q.shape[3], count):
        q_block = q[..., at : at + count, :]
        if rows is None:
            first, last = offset + at, offset + at + q_block.shape[3] - 1
            query_at = torch.arange(first, last + 1, device=device)
            key_at, head, low = _key_places(first, last, bands, device)
            k_block, v_block = (
                None if x is None else torch.cat([x[:, :, :head], x[:, :, low : last + 1]], 2) for x in (k, v)
            )
        else:
            query_at, key_at = rows[at : at + count] + offset, torch.arange(s, device=device)
            k_block, v_block = k, v
        operands: Any = (q_block, k_block, v_block, query_at, key_at, bands, scale, sinks, span, statistics)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
            parts.append(checkpoint(_block, *operands, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_block(*operands))
    whole: list[Tensor | None] = []
    for i, pieces in enumerate(zip(*parts, strict=True)):
        if pieces[0] is None:
            whole.append(None)
            continue
        joined = torch.cat([x for x in pieces if x is not None], 3).flatten(1, 2)
        whole.append(joined.transpose(1, 2) if i == 0 else joined)
    return whole


def statistics_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    rows: Tensor | None,
) -> AttentionStatistics:
    offset, bands = key.shape[1] - query.shape[1], binding(bands, key.shape[1])
    dtype, work = None if value is None else value.dtype, common_dtype(query, key, value)
    query, key = query.to(work), key.to(work)
    value = None if value is None or rows is not None else value.to(work)
    with torch.autocast(query.device.type, enabled=False):
        whole = by_rows(query, key, value, bands, scale, sink_logits, spans, rows, statistics=True)
    out, lse, entropy, top, place, sink_mass, mass = whole
    assert lse is not None
    assert entropy is not None
    assert top is not None
    at = torch.arange(query.shape[1], device=query.device) if rows is None else rows
    out = None if out is None else out.to(dtype)
    return AttentionStatistics(out, lse, entropy, top, place, sink_mass, mass, visible_count(at + offset, bands))
