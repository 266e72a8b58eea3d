"""Forward kernel of attention: one pass over the visible keys with a running maximum, statistics fused in.

With s_j = scale q . k_j, m the running maximum, x_j = s_j - m and p_j = exp(x_j) (all kept in base 2):

    l = sum p_j        e = sum p_j x_j        acc = sum p_j v_j
    m -> m':  l *= a,  e = a (e + (m - m') l),  acc *= a        with a = exp(m - m')

    out = acc / L    lse = m + log L    H = (log L) l / L - e / L        L = l, or l + exp(z - m) with a sink logit z

The mass of a span is its part of sum p_j. Tiles of keys within the span add the row sum that l gets too, by a factor of
1 or 0 instead of a branch, which would keep the compiler from mixing a tile's products with its exponentials. Tiles at
the span's edges are formed once more behind the pass, under a mask.

Exponents are s_j - base, rounded once, where base is m rounded in base 2. Sums move from base to base by the difference
of these very numbers: another rounding of m - m' would make them drift, tile after tile.

Online softmax: Milakov and Gimelshein 2018; tiling: Dao 2023 (FlashAttention-2). e is summed around base and in the end
counted from m, not as sum p_j s_j, because the entropy of scores that lie far from 0 would cancel.
"""

import triton
import triton.language as tl

from kernels.attention.tiles import (
    LN2,
    LOG2E,
    head_of,
    key_tiles,
    load_tile,
    masked_key_tile,
    sectioned,
    seen_keys,
    store_tile,
    visible_keys,
)

LOWEST = tl.constexpr(-3e38)


@triton.jit
def rounded(x):
    """x, to be used in a sum; a device rounds a product and its sum only once unless something lies between.

    -inf, of rows that have met hidden keys only, becomes finite, and so do differences.
    """
    return tl.maximum(x, LOWEST)


@triton.jit
def span_edges(spans, b, SPANS: tl.constexpr):
    """First keys and ends of the spans of batch row b, as tuples of numbers."""
    firsts = ()
    stops = ()
    for n in tl.static_range(SPANS):
        at = spans + (tl.cast(b, tl.int64) * SPANS + n) * 2
        firsts = firsts + (tl.load(at).to(tl.int32),)  # type: ignore[assignment]
        stops = stops + (tl.load(at + 1).to(tl.int32),)  # type: ignore[assignment]
    return firsts, stops


@triton.jit(do_not_specialize=["scale", "T", "S", "H", "share", "section", "heads"])
def forward_kernel(
    q,
    k,
    v,
    positions,
    sink_logits,
    out,
    lse,
    entropy,
    largest,
    argmax,
    spans,
    mass,
    visible,
    q_stride,
    k_stride,
    v_stride,
    bands,
    scale,
    T,
    S,
    H,
    share,
    section,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
    LARGEST: tl.constexpr,
    ARGMAX: tl.constexpr,
    SPANS: tl.constexpr,  # number of spans
    DESCRIPTOR: tl.constexpr,
):
    tiles = tl.cdiv(T, BLOCK_T)
    rank, bh = sectioned(tiles, heads, section)
    first_row = (tiles - 1 - rank) * BLOCK_T
    b = bh // H
    h = bh % H
    g = h // share
    row = first_row + tl.arange(0, BLOCK_T)
    if ROWS:
        query_at = tl.load(positions + tl.minimum(row, T - 1))
        start = tl.min(query_at, 0)
        end = tl.max(query_at, 0)
    else:
        query_at = tl.minimum(row + (S - T), S - 1)
        start = first_row + (S - T)
        end = tl.minimum(start + BLOCK_T, S) - 1

    q = head_of(q, b, h, q_stride, ALIGN, DESCRIPTOR)
    k = head_of(k, b, g, k_stride, ALIGN, DESCRIPTOR)
    if HAS_OUT:
        v = head_of(v, b, g, v_stride, ALIGN, DESCRIPTOR)
        acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    q_tile = load_tile(q, b, first_row, h, q_stride, T, ALIGN, BLOCK_T, K, BLOCK_K, True, DESCRIPTOR)
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)  # of the products q . k, not yet scaled
    base = rounded(m)
    sum_p = tl.zeros([BLOCK_T], tl.float32)
    if ENTROPY:
        e = tl.zeros([BLOCK_T], tl.float32)
    if ARGMAX:
        best = tl.full([BLOCK_T], 2147483647, tl.int32)
    firsts, stops = span_edges(spans, b, SPANS)
    masses = ()
    for _ in tl.static_range(SPANS):
        masses = masses + (tl.zeros([BLOCK_T], tl.float32),)  # type: ignore[assignment]
    scale2 = scale * LOG2E

    low, high, masked = key_tiles(start, end, bands, BLOCK_S)
    for phase in tl.static_range(2):  # the tiles without a hidden key, then those that need the mask
        count = high - low if phase == 0 else masked
        for i in range(count):
            if phase == 0:
                key = (low + i) * BLOCK_S
            else:
                key = masked_key_tile(i, start, end, low, high, bands, BLOCK_S) * BLOCK_S
            k_tile = load_tile(k, b, key, g, k_stride, S, ALIGN, BLOCK_S, K, BLOCK_K, phase == 1, DESCRIPTOR)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            key_at = key + tl.arange(0, BLOCK_S)
            if phase == 1:
                seen = seen_keys(query_at[:, None], key_at[None, :], bands)
                scores = tl.where(seen, scores, float("-inf"))
            tile_max = tl.max(scores, 1)
            if ARGMAX:
                place = tl.min(tl.where(scores == tile_max[:, None], key_at[None, :], 2147483647), 1)
                better = tile_max > m
                if phase == 1:  # tiles with a mask may lie before tiles already passed
                    better = better | ((tile_max == m) & (place < best))
                best = tl.where(better, place, best)
            m_new = tl.maximum(m, tile_max)
            base_new = rounded(m_new * scale2)
            x = tl.fma(scores, scale2, -base_new[:, None])
            p = tl.exp2(x)
            shift = base - base_new
            a = tl.exp2(shift)
            if ENTROPY:
                px = tl.where(seen, p * x, 0.0) if phase == 1 else p * x
                e = a * (e + shift * sum_p) + tl.sum(px, 1)
            tile_sum = tl.sum(p, 1)
            sum_p = sum_p * a + tile_sum
            within = ()
            for j in tl.static_range(SPANS):
                whole = ((firsts[j] <= key) & (key + BLOCK_S <= stops[j])).to(tl.float32)
                within = within + (masses[j] * a + whole * tile_sum,)  # type: ignore[assignment]
            masses = within
            if HAS_OUT:
                acc = acc * a[:, None]
                v_tile = load_tile(v, b, key, g, v_stride, S, ALIGN, BLOCK_S, V, BLOCK_V, phase == 1, DESCRIPTOR)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            m = m_new
            base = base_new

    inside = row < T
    at = tl.cast(bh, tl.int64) * T + row
    rest = 0.0
    total = sum_p
    if ENTROPY:  # from here on around m itself: a key that has all weight then leaves exactly 0
        rest = tl.fma(m, scale2, -base)
        largest_p = tl.exp2(rest)
        others = (sum_p - largest_p) / largest_p
        total = 1.0 + others
        e = (e - rounded(largest_p * rest)) / largest_p - rest * others
    weight = 1.0 / total
    log_total = tl.log2(total)
    if HAS_SINK:
        gap = tl.load(sink_logits + h).to(tl.float32) * LOG2E - base - rest
        above = tl.maximum(gap, 0.0)
        kept = tl.exp2(-above)
        with_sink = total * kept + tl.exp2(gap - above)
        weight = kept / with_sink
        log_total = tl.log2(with_sink) + above
    tl.store(lse + at, (base + (rest + log_total)) * LN2, mask=inside)
    if ENTROPY:
        tl.store(entropy + at, (log_total * (total * weight) - e * weight) * LN2, mask=inside)
        weight = weight / largest_p  # of what was summed around base
        if bh == 0:  # of all heads the same
            tl.store(visible + row, visible_keys(query_at, bands).to(tl.int64), mask=inside)
    if LARGEST:
        tl.store(largest + at, m * scale, mask=inside)
    if ARGMAX:
        tl.store(argmax + at, best.to(tl.int64), mask=inside)
    if HAS_OUT:
        out += (tl.cast(b, tl.int64) * T * H + h) * V
        store_tile(out, acc * weight[:, None], first_row, H * V, T, BLOCK_T, V, BLOCK_V)
    if SPANS > 0:
        for n in tl.range(SPANS, num_stages=1):  # more stages would take shared memory from another program
            first = 0
            stop = 0
            total = tl.zeros([BLOCK_T], tl.float32)
            for j in tl.static_range(SPANS):
                first = tl.where(n == j, firsts[j], first)
                stop = tl.where(n == j, stops[j], stop)
                total = tl.where(n == j, masses[j], total)
            whole_from = tl.cdiv(first, BLOCK_S) * BLOCK_S
            for edge in tl.static_range(2):
                if edge == 0:
                    key = first // BLOCK_S * BLOCK_S
                    low = first
                    high = tl.minimum(stop, whole_from)
                else:
                    key = tl.maximum(stop // BLOCK_S * BLOCK_S, whole_from)
                    low = key
                    high = stop
                reached = (low < high) & (low <= end)
                if len(bands) > 0:  # keys from the last sink on are seen through the narrowest window only
                    reached = reached & ((low < bands[0][1]) | (high > start - bands[0][0] + 1))
                if reached:
                    k_tile = load_tile(k, b, key, g, k_stride, S, ALIGN, BLOCK_S, K, BLOCK_K, True, DESCRIPTOR)
                    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    key_at = key + tl.arange(0, BLOCK_S)
                    seen = seen_keys(query_at[:, None], key_at[None, :], bands)
                    seen = seen & ((key_at >= low) & (key_at < high))[None, :]
                    total += tl.sum(tl.where(seen, tl.exp2(tl.fma(scores, scale2, -base[:, None])), 0.0), 1)
            tl.store(mass + at * SPANS + n, total * weight, mask=inside)
