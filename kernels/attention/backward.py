"""Backward kernels of attention: key and value gradients per tile of keys, query gradients per tile of queries.

With p_j = exp(s_j - lse), s_j = scale q . k_j and the cotangents do of out, h of the entropy H, u of the largest score,
c_n of the masses M_n on spans I_n, y of lse, and pi the sink's probability (0 without a sink):

    ds_j = p_j (do . v_j - r - h log p_j + sum_n c_n [j in I_n]) + u [j = argmax]
    r    = do . o - y + h (H + pi) + sum_n c_n M_n
    dv_j = sum_t p_tj do_t        dk_j = scale sum_t ds_tj q_t        dq_t = scale sum_j ds_tj k_j
    dz   = sum_t pi_t (h_t - r_t)

Probabilities are made again from lse (Dao 2023, FlashAttention-2). Two kernels, each summing in one program and in one
order, so that gradients are the same bits in every run. Key gradients work on transposed scores, s^T = k q^T, as such:
no product is ever transposed. Query heads that share a kv head are summed inside its program.
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
    query_tiles,
    sectioned,
    seen_keys,
    store_tile,
)

PADDING = tl.constexpr(128)  # lines of the row terms are padded to a multiple of it, the largest tile of queries


@triton.jit(do_not_specialize=["T", "H"])
def row_kernel(
    out,
    d_out,
    lse,
    extra,
    row_lse,
    row_term,
    out_stride,
    d_out_stride,
    T,
    H,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):
    """row_lse = lse in base 2 and row_term = do . o + extra, padded with inf and 0: padding has probability 0 then, and
    the loops of the other kernels need no bounds."""
    line = tl.cdiv(T, PADDING) * PADDING
    tiles = line // BLOCK_T
    bh = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_T
    b = bh // H
    h = bh % H
    row = first + tl.arange(0, BLOCK_T)
    inside = row < T
    term = tl.zeros([BLOCK_T], tl.float32)
    if HAS_OUT:
        out = head_of(out, b, h, out_stride, ALIGN, False)
        d_out = head_of(d_out, b, h, d_out_stride, ALIGN, False)
        x = load_tile(out, b, first, h, out_stride, T, ALIGN, BLOCK_T, V, BLOCK_V, True, False)
        y = load_tile(d_out, b, first, h, d_out_stride, T, ALIGN, BLOCK_T, V, BLOCK_V, True, False)
        term += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    at = tl.cast(bh, tl.int64) * T + row
    if HAS_EXTRA:
        term += tl.load(extra + at, mask=inside, other=0.0)
    to = tl.cast(bh, tl.int64) * line + row
    tl.store(row_term + to, term)
    tl.store(row_lse + to, tl.load(lse + at, mask=inside, other=float("inf")) * LOG2E)


@triton.jit
def load_rows(x, bh, first, T, BLOCK_T: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """BLOCK_T numbers of line bh of a padded row term."""
    if DESCRIPTOR:
        rows = x.load([bh, first]).reshape(BLOCK_T)
    else:
        line = tl.cdiv(T, PADDING) * PADDING
        rows = tl.load(x + tl.cast(bh, tl.int64) * line + first + tl.arange(0, BLOCK_T))
    return rows


@triton.jit
def statistic_terms(
    slope,
    x,
    seen,
    row,
    key_at,
    b,
    bh,
    T,
    d_entropy,
    d_largest,
    argmax,
    d_mass,
    spans,
    N,
    MASS: tl.constexpr,
    AXIS: tl.constexpr,
):
    """The part of ds / p that comes from entropy and masses, added to `slope`, and the place of the largest score.

    x is log2 p; rows lie along axis 1 - AXIS of the tile, keys along AXIS. d_mass is [B, H, N, T].
    """
    line = tl.cast(bh, tl.int64) * T
    inside = row < T
    d_h = tl.load(d_entropy + line + row, mask=inside, other=0.0)
    slope -= tl.expand_dims(d_h, AXIS) * tl.where(seen, x * LN2, 0.0)
    if MASS:
        for n in range(N):
            first = tl.load(spans + (tl.cast(b, tl.int64) * N + n) * 2)
            stop = tl.load(spans + (tl.cast(b, tl.int64) * N + n) * 2 + 1)
            d_m = tl.load(d_mass + (line * N + tl.cast(n, tl.int64) * T) + row, mask=inside, other=0.0)
            held = (key_at >= first) & (key_at < stop)
            slope += tl.expand_dims(d_m, AXIS) * tl.where(held, 1.0, 0.0)
    d_u = tl.load(d_largest + line + row, mask=inside, other=0.0)
    place = tl.load(argmax + line + row, mask=inside, other=-1).to(tl.int32)
    return slope, tl.where(tl.expand_dims(place, AXIS) == key_at, tl.expand_dims(d_u, AXIS), 0.0)


@triton.jit(do_not_specialize=["scale", "T", "S", "H", "share", "section", "heads", "N"])
def key_value_kernel(
    q,
    k,
    v,
    d_out,
    positions,
    row_lse,
    row_term,
    d_entropy,
    d_largest,
    argmax,
    d_mass,
    spans,
    dk,
    dv,
    q_stride,
    k_stride,
    v_stride,
    d_out_stride,
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
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    STATISTICS: tl.constexpr,
    MASS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    rank, bg = sectioned(tl.cdiv(S, BLOCK_S), heads, section)
    start = rank * BLOCK_S
    G = H // share
    b = bg // G
    g = bg % G
    key_at = start + tl.arange(0, BLOCK_S)
    k = head_of(k, b, g, k_stride, ALIGN, DESCRIPTOR)
    k_tile = load_tile(k, b, start, g, k_stride, S, ALIGN, BLOCK_S, K, BLOCK_K, True, DESCRIPTOR)
    dk_tile = tl.zeros([BLOCK_S, BLOCK_K], tl.float32)
    if HAS_OUT:
        v = head_of(v, b, g, v_stride, ALIGN, DESCRIPTOR)
        v_tile = load_tile(v, b, start, g, v_stride, S, ALIGN, BLOCK_S, V, BLOCK_V, True, DESCRIPTOR)
        dv_tile = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
    scale2 = scale * LOG2E
    end = tl.minimum(start + BLOCK_S, S) - 1
    first, low, high, stop = query_tiles(start, end, S - T, T, bands, BLOCK_T, ROWS)

    for member in range(share):
        h = g * share + member
        q_head = head_of(q, b, h, q_stride, ALIGN, DESCRIPTOR)
        if HAS_OUT:
            d_out_head = head_of(d_out, b, h, d_out_stride, ALIGN, DESCRIPTOR)
        for phase in tl.static_range(2):  # the tiles without a hidden pair, then those that need the mask
            count = high - low if phase == 0 else low - first + stop - high
            for i in range(count):
                tile = low + i if phase == 0 else tl.where(i < low - first, first + i, high + i - (low - first))
                at_row = tile * BLOCK_T
                row = at_row + tl.arange(0, BLOCK_T)
                q_tile = load_tile(q_head, b, at_row, h, q_stride, T, ALIGN, BLOCK_T, K, BLOCK_K, True, DESCRIPTOR)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale2
                x -= load_rows(row_lse, b * H + h, at_row, T, BLOCK_T, DESCRIPTOR)[None, :]
                seen = (row < T)[None, :]
                if phase == 1:
                    query_at = tl.load(positions + row, mask=row < T, other=-1) if ROWS else row + (S - T)
                    seen = seen_keys(query_at[None, :], key_at[:, None], bands) & seen
                    x = tl.where(seen, x, float("-inf"))
                p = tl.exp2(x)
                r = load_rows(row_term, b * H + h, at_row, T, BLOCK_T, DESCRIPTOR)
                if HAS_OUT:
                    d_out_tile = load_tile(
                        d_out_head, b, at_row, h, d_out_stride, T, ALIGN, BLOCK_T, V, BLOCK_V, True, DESCRIPTOR
                    )
                    dv_tile = tl.dot(p.to(d_out_tile.dtype), d_out_tile, dv_tile, input_precision=PRECISION)
                    slope = tl.dot(v_tile, tl.trans(d_out_tile), input_precision=PRECISION) - r[None, :]
                else:
                    slope = tl.zeros([BLOCK_S, BLOCK_T], tl.float32) - r[None, :]
                if STATISTICS:
                    slope, peak = statistic_terms(
                        slope,
                        x,
                        seen,
                        row,
                        key_at[:, None],
                        b,
                        b * H + h,
                        T,
                        d_entropy,
                        d_largest,
                        argmax,
                        d_mass,
                        spans,
                        N,
                        MASS,
                        0,
                    )
                    ds = p * slope + peak
                else:
                    ds = p * slope
                dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)

    at = tl.cast(b, tl.int64) * S * G + g
    store_tile(dk + at * K, dk_tile * scale, start, G * K, S, BLOCK_S, K, BLOCK_K)
    if HAS_OUT:
        store_tile(dv + at * V, dv_tile, start, G * V, S, BLOCK_S, V, BLOCK_V)


@triton.jit(do_not_specialize=["scale", "T", "S", "H", "share", "section", "heads", "N"])
def query_kernel(
    q,
    k,
    v,
    d_out,
    positions,
    row_lse,
    row_term,
    d_entropy,
    d_largest,
    argmax,
    d_mass,
    spans,
    dq,
    q_stride,
    k_stride,
    v_stride,
    d_out_stride,
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
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    STATISTICS: tl.constexpr,
    MASS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
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

    q = head_of(q, b, h, q_stride, ALIGN, DESCRIPTOR)
    k = head_of(k, b, g, k_stride, ALIGN, DESCRIPTOR)
    q_tile = load_tile(q, b, first_row, h, q_stride, T, ALIGN, BLOCK_T, K, BLOCK_K, True, DESCRIPTOR)
    lse_tile = load_rows(row_lse, bh, first_row, T, BLOCK_T, DESCRIPTOR)
    r = load_rows(row_term, bh, first_row, T, BLOCK_T, DESCRIPTOR)
    if HAS_OUT:
        v = head_of(v, b, g, v_stride, ALIGN, DESCRIPTOR)
        d_out = head_of(d_out, b, h, d_out_stride, ALIGN, DESCRIPTOR)
        d_out_tile = load_tile(d_out, b, first_row, h, d_out_stride, T, ALIGN, BLOCK_T, V, BLOCK_V, True, DESCRIPTOR)
    dq_tile = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    scale2 = scale * LOG2E

    low, high, masked = key_tiles(start, end, bands, BLOCK_S)
    for phase in tl.static_range(2):
        count = high - low if phase == 0 else masked
        for i in range(count):
            if phase == 0:
                key = (low + i) * BLOCK_S
            else:
                key = masked_key_tile(i, start, end, low, high, bands, BLOCK_S) * BLOCK_S
            key_at = key + tl.arange(0, BLOCK_S)
            k_tile = load_tile(k, b, key, g, k_stride, S, ALIGN, BLOCK_S, K, BLOCK_K, phase == 1, DESCRIPTOR)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale2 - lse_tile[:, None]
            seen = inside[:, None]
            if phase == 1:
                seen = seen_keys(query_at[:, None], key_at[None, :], bands) & inside[:, None]
                x = tl.where(seen, x, float("-inf"))
            p = tl.exp2(x)
            if HAS_OUT:
                v_tile = load_tile(v, b, key, g, v_stride, S, ALIGN, BLOCK_S, V, BLOCK_V, phase == 1, DESCRIPTOR)
                slope = tl.dot(d_out_tile, tl.trans(v_tile), input_precision=PRECISION) - r[:, None]
            else:
                slope = tl.zeros([BLOCK_T, BLOCK_S], tl.float32) - r[:, None]
            if STATISTICS:
                slope, peak = statistic_terms(
                    slope,
                    x,
                    seen,
                    row,
                    key_at[None, :],
                    b,
                    bh,
                    T,
                    d_entropy,
                    d_largest,
                    argmax,
                    d_mass,
                    spans,
                    N,
                    MASS,
                    1,
                )
                ds = p * slope + peak
            else:
                ds = p * slope
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)

    dq += (tl.cast(b, tl.int64) * T * H + h) * K
    store_tile(dq, dq_tile * scale, first_row, H * K, T, BLOCK_T, K, BLOCK_K)
