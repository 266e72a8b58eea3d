"""Windows of few chunks: a band of the decay-weighted attention matrix, without states.

    o_t = scale * sum over t - w < s <= t of exp(g_{s+1} + ... + g_t) (q_t . k_s) v_s

Every chunk of C reading tokens visits the ceil((w - 1) / C) chunks before it (behind it, for the gradients of key and
value) and its own. The log decay of a pair is that of the reading token up to its chunk's edge, of the chunks in
between and of the written token from its chunk's edge, each <= 0; a decay fixed per head is the distance times g.
Operands, and which output is which: triton_sweep.py. The gradient of the decay collects the pairs that decay over l,
d g_l = sum over j < l <= i of P_ij: those inside the chunk, those that end in it (i >= l), those that start in it
(j < l), and those around it, whose sums per pair of chunks the pass forwards leaves for the pass backwards.
"""

import triton
import triton.language as tl

from kernels.linear_decay.triton_sweep import place, rows, summed_decays

PLAIN = ["tokens", "sequences", "per_sequence", "window", "scale", "places"]


@triton.jit
def sum_before(values, place_):
    """Sum of the values before each place; not a difference of sums: the place's own value may be much larger."""
    return tl.sum(tl.where(place_[:, None] > place_[None, :], values[None, :], 0.0), axis=1)


@triton.jit
def weighted(
    x, y, u, r, exponent, distance, window, scale, GATE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Weighted scores [C, C], reading tokens along the rows, and their pairs for the decay's gradient."""
    pairs = tl.zeros([u.shape[0], x.shape[0]], tl.float32)
    seen = (distance >= 0) & (distance < window)
    weights = tl.exp(tl.where(seen, exponent, float("-inf"))) * scale
    scores = tl.dot(u, tl.trans(x), input_precision=PRECISION) * weights
    if GATE:
        pairs = tl.dot(r, tl.trans(y), input_precision=PRECISION) * scores
    return scores, pairs


@triton.jit
def band_pass(
    x, y, u, r, out, gates, gate, around, cu_seqlens, segment_ends,
    x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h, r_b, r_t, r_h, gates_h,
    tokens, sequences, per_sequence, window, scale, places, program, H, X, Y,
    C: tl.constexpr, X_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr, DEPTH: tl.constexpr,
    REVERSE: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one chunk of reading tokens; `around` [chunks, H, tiles, DEPTH + 1] holds sums of pairs of chunks."""
    x_tiles, y_tiles = tl.cdiv(X, X_TILE), tl.cdiv(Y, Y_TILE)
    tile = program % (x_tiles * y_tiles)
    head = (program // (x_tiles * y_tiles)) % H
    segment = program // (x_tiles * y_tiles * H)
    part = tile // y_tiles
    x0, y0 = part * X_TILE, (tile % y_tiles) * Y_TILE
    sequence, row, m, low, high = place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE)
    if sequence < sequences:
        head_ = head.to(tl.int64)
        x += row * x_b + head_ * x_h
        y += row * y_b + head_ * y_h
        u += row * u_b + head_ * u_h
        r += row * r_b + head_ * r_h
        rate = 0.0 if PER_TOKEN else tl.load(gates + head * gates_h).to(tl.float32)
        row_here = segment.to(tl.int64) * H + head
        # A tile of K and V is the same place of `around` forwards (x = value) and backwards (x = d out).
        slot = around + row_here * (x_tiles * y_tiles * (DEPTH + 1)) + tile * (DEPTH + 1)
        neighbour_slot = H * x_tiles * y_tiles * (DEPTH + 1)
        n = tl.arange(0, C)
        column = y0 + tl.arange(0, Y_TILE)
        begin = low + m * C
        end = tl.minimum(begin + C, high)
        since, rest, _ = summed_decays(gates, rate, row_here, end - begin, C, PER_TOKEN)
        u_tile = rows(u, u_t, begin, end, x0, X, C, X_TILE)
        r_tile = rows(r, r_t, begin, end, y0, Y, C, Y_TILE) if GATE else u_tile
        x_tile = rows(x, x_t, begin, end, x0, X, C, X_TILE)
        y_tile = rows(y, y_t, begin, end, y0, Y, C, Y_TILE)
        distance = n[None, :] - n[:, None] if REVERSE else n[:, None] - n[None, :]
        if PER_TOKEN:
            exponent = since[None, :] - since[:, None] if REVERSE else since[:, None] - since[None, :]
        else:
            exponent = distance.to(tl.float32) * rate
        scores, pairs = weighted(
            x_tile, y_tile, u_tile, r_tile, exponent, distance, window, scale, GATE and not REVERSE, PRECISION
        )
        far = tl.zeros([C], tl.float32)
        inner = tl.zeros([C], tl.float32)
        if GATE and not REVERSE:  # l along the rows; no difference of sums: pairs not decaying over l give exactly 0
            ending_later = tl.cumsum(pairs, axis=0, reverse=True)
            inner = tl.sum(tl.where(n[:, None] > n[None, :], ending_later, 0.0), axis=1)
        answers = tl.dot(scores.to(x_tile.dtype), y_tile, input_precision=PRECISION)
        depth = tl.minimum(DEPTH, tl.cdiv(high - begin, C).to(tl.int32) - 1) if REVERSE else tl.minimum(DEPTH, m)
        between = 0.0
        for step in range(0, depth):
            d = step + 1
            there = begin + d * C if REVERSE else begin - d * C
            there_end = tl.minimum(there + C, high)
            row_there = row_here + (d if REVERSE else -d) * H
            since_there, rest_there, total = summed_decays(gates, rate, row_there, there_end - there, C, PER_TOKEN)
            x_there = rows(x, x_t, there, there_end, x0, X, C, X_TILE)
            y_there = rows(y, y_t, there, there_end, y0, Y, C, Y_TILE)
            apart = d * C + (n[None, :] - n[:, None] if REVERSE else n[:, None] - n[None, :])
            if PER_TOKEN:
                if REVERSE:
                    sums = (between + rest)[:, None] + since_there[None, :]
                else:
                    sums = (between + since)[:, None] + rest_there[None, :]
            else:
                sums = apart.to(tl.float32) * rate
            between += total
            weights, ends = weighted(x_there, y_there, u_tile, r_tile, sums, apart, window, scale, GATE, PRECISION)
            answers = tl.dot(weights.to(x_there.dtype), y_there, acc=answers, input_precision=PRECISION)
            if GATE:
                ending = tl.sum(ends, axis=1)
                far += ending
                if not REVERSE:
                    tl.store(slot + d, tl.sum(ending, axis=0))
        mine = n < end - begin
        out += (part.to(tl.int64) * places + row * tokens * H + head) * Y
        out_at = out + begin * H * Y + (n[:, None] * (H * Y) + column[None, :])
        tl.store(out_at, answers.to(out.dtype.element_ty), mask=mine[:, None] & (column < Y)[None, :])
        if GATE:
            gate += tile.to(tl.int64) * places + row * tokens * H + head
            if REVERSE:
                passing = 0.0
                for d in tl.static_range(2, DEPTH + 1):
                    for s in tl.static_range(1, d):  # from chunk m + s - d, before this one, to chunk m + s, behind it
                        exists = (s <= depth) & (m + s >= d)
                        passing += tl.load(slot + s * neighbour_slot + d, mask=exists, other=0.0)
                sums_out = sum_before(far, n) + passing
            else:
                sums_out = tl.cumsum(far, axis=0, reverse=True) + inner
            tl.store(gate + begin * H + n * H, sums_out, mask=mine)


@triton.jit(do_not_specialize=PLAIN)
def band(
    x, y, u, r, out, gates, gate, around, cu_seqlens, segment_ends,
    x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h, r_b, r_t, r_h, gates_h,
    tokens, sequences, per_sequence, window, scale, places, H, X, Y,
    C: tl.constexpr, X_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr, DEPTH: tl.constexpr,
    PER_TOKEN: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out or d query."""
    band_pass(
        x, y, u, r, out, gates, gate, around, cu_seqlens, segment_ends, x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h,
        r_b, r_t, r_h, gates_h, tokens, sequences, per_sequence, window, scale, places,
        tl.program_id(0), H, X, Y, C, X_TILE, Y_TILE, N_TILE, DEPTH, False, PER_TOKEN, GATE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=PLAIN)
def band_key_value(
    query, d_out, key, value, d_key, d_value, gates, gate, around, cu_seqlens, segment_ends,
    query_b, query_t, query_h, d_out_b, d_out_t, d_out_h, key_b, key_t, key_h, value_b, value_t, value_h,
    gates_h, tokens, sequences, per_sequence, window, scale, places, H, K, V,
    C: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr,
    DEPTH: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d value by even and d key by odd programs."""
    if tl.program_id(0) % 2 == 0:
        band_pass(
            query, d_out, key, value, d_value, gates, gate, around, cu_seqlens, segment_ends,
            query_b, query_t, query_h, d_out_b, d_out_t, d_out_h, key_b, key_t, key_h, value_b, value_t, value_h,
            gates_h, tokens, sequences, per_sequence, window, scale, places, tl.program_id(0) // 2,
            H, K, V, C, K_TILE, Y_TILE, N_TILE, DEPTH, True, PER_TOKEN, False, PRECISION,
        )  # fmt: skip
    else:
        band_pass(
            d_out, query, value, key, d_key, gates, gate, around, cu_seqlens, segment_ends,
            d_out_b, d_out_t, d_out_h, query_b, query_t, query_h, value_b, value_t, value_h, key_b, key_t, key_h,
            gates_h, tokens, sequences, per_sequence, window, scale, places, tl.program_id(0) // 2,
            H, V, K, C, V_TILE, Y_TILE, N_TILE, DEPTH, True, PER_TOKEN, GATE, PRECISION,
        )  # fmt: skip
