"""Attention mass on spans of keys, M_n = sum over visible j in I_n of exp(s_j - lse), from the forward kernel's lse.

For more spans than the forward kernel keeps itself. Only key tiles that meet a span are visited, so the cost follows
the spans' lengths: a span of all keys costs the score half of another forward pass, a short one next to nothing.
"""

import triton
import triton.language as tl

from kernels.attention.tiles import LOG2E, head_of, load_tile, sectioned, seen_keys


@triton.jit(do_not_specialize=["scale", "T", "S", "H", "share", "section", "heads", "N"])
def mass_kernel(
    q,
    k,
    positions,
    lse,
    spans,
    mass,
    q_stride,
    k_stride,
    bands,
    scale,
    T,
    S,
    H,
    share,
    section,
    heads,
    N,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):
    tiles = tl.cdiv(T, BLOCK_T)
    rank, bh = sectioned(tiles, heads, section)
    first_row = (tiles - 1 - rank) * BLOCK_T
    b = bh // H
    h = bh % H
    g = h // share
    row = first_row + tl.arange(0, BLOCK_T)
    inside = row < T
    if ROWS:
        query_at = tl.load(positions + tl.minimum(row, T - 1))
        start = tl.min(query_at, 0)
        end = tl.max(query_at, 0)
    else:
        query_at = tl.minimum(row + (S - T), S - 1)
        start = first_row + (S - T)
        end = tl.minimum(start + BLOCK_T, S) - 1
    q = head_of(q, b, h, q_stride, ALIGN, False)
    k = head_of(k, b, g, k_stride, ALIGN, False)
    q_tile = load_tile(q, b, first_row, h, q_stride, T, ALIGN, BLOCK_T, K, BLOCK_K, True, False)
    at = tl.cast(bh, tl.int64) * T + row
    row_lse = tl.load(lse + at, mask=inside, other=float("inf")) * LOG2E
    scale2 = scale * LOG2E
    sinks = 0  # keys below it may be seen from anywhere, keys from it on only through the narrowest window
    reach = 0
    if len(bands) > 0:
        sinks = bands[0][1]
        reach = tl.maximum(start - bands[0][0] + 1, 0)

    for n in range(N):
        span = spans + (tl.cast(b, tl.int64) * N + n) * 2
        span_first = tl.maximum(tl.load(span), 0).to(tl.int32)
        span_stop = tl.minimum(tl.load(span + 1), end + 1).to(tl.int32)
        total = tl.zeros([BLOCK_T], tl.float32)
        for part in tl.static_range(2):
            if part == 0:
                first = span_first
                stop = tl.minimum(span_stop, sinks)
            else:
                first = tl.maximum(span_first, tl.maximum(sinks, reach))
                stop = span_stop
            if part == 1 or len(bands) > 0:
                low = first // BLOCK_S
                count = tl.maximum(tl.cdiv(stop, BLOCK_S) - low, 0)
                if stop <= first:
                    count = 0
                for i in range(count):
                    key = (low + i) * BLOCK_S
                    k_tile = load_tile(k, b, key, g, k_stride, S, ALIGN, BLOCK_S, K, BLOCK_K, True, False)
                    x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale2 - row_lse[:, None]
                    key_at = key + tl.arange(0, BLOCK_S)
                    seen = seen_keys(query_at[:, None], key_at[None, :], bands)
                    seen = seen & ((key_at >= first) & (key_at < stop))[None, :]
                    total += tl.sum(tl.where(seen, tl.exp2(x), 0.0), 1)
        tl.store(mass + at * N + n, total, mask=inside)
