"""Triton: scans of the state over chunks, forwards in time.

With e = exp(G), r = exp(G_C - G) and x = beta z, a chunk is (triton_factors.py has z)

    y = v - e (k S),    z = (I + L diag(beta))^-1 y,    o = scale (e (q S) + P x),    S' = exp(G_C) S + (r k)^T x

with P_ij = exp(G_i - G_j) q_i . k_j, j <= i. Everything is linear in the columns of [v, S], so the same scan with v = 0
and S = I gives a segment's transition M as its end state, and as its outputs the pulled-back queries q~ of
kernels/blocks.py. Segments run in parallel twice: from [0 | I], which gives S_end = M S + X, then, when the short scan
over segments has found the right starts, for the outputs.

With a window, a token reads the state only if its block was already open before the chunk, and adds to it only if its
block is still open at the chunk's last token. "Transition" columns start again at I with each block, "value" columns
at 0.
"""

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_factors import block_number, decays


@triton.jit(do_not_specialize=["W", "scale"])
def scan_kernel(
    q, k, v, beta, since, rest, inverse, chunks, segments, starts, ends, out, pulled, states, written,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, beta_b, beta_t, beta_h, s_b, s_t, o_b, o_t, o_h, p_b, p_t, p_h,
    H, W, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VALUE_TILES: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr, LINKED: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, ENDS: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One segment, one head, one tile of columns; tiles from VALUE_TILES on are transition columns.

    LINKED: starts [segments, H, K, columns] are read, else 0 | I. OUTPUT 1: out and pulled are written, 2: pulled only.
    ENDS 1: ends is [segments, H, K, columns], 2: [sequences, ...], written by a sequence's last segment, 0: not.
    SAVE: states [chunks, H, K, columns] and written (z) [chunks, H, C, columns] are written. SPANS: segments are spans;
    where one begins the state is known, 0 | I, and not written.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    h = (program // TILES) % H
    segment = program // TILES // H
    low = tl.load(segments + segment * 4)
    high = tl.load(segments + segment * 4 + 1)
    sequence = tl.load(segments + segment * 4 + 2).to(tl.int64)
    b = tl.load(chunks + low * 4).to(tl.int64)
    begin = tl.load(chunks + low * 4 + 1)
    start = tl.load(chunks + low * 4 + 2)
    end = tl.load(chunks + low * 4 + 3)

    TRANSITION: tl.constexpr = TILES > VALUE_TILES
    COLUMNS: tl.constexpr = V + K if TRANSITION else V
    if TRANSITION:
        is_value = tile < VALUE_TILES
        local = tl.where(is_value, tile, tile - VALUE_TILES) * BV + tl.arange(0, BV)
        is_own = local < tl.where(is_value, 0, K)
        is_written = local < tl.where(is_value, V, 0)
        column = local + tl.where(is_value, 0, V)
    else:
        local = tile * BV + tl.arange(0, BV)
        is_written = local < V
        is_own = local < 0
        column = local
    in_width = is_own | is_written
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    dtype = k.dtype.element_ty
    in_state = in_key[:, None] & in_width[None, :]
    state_at = key_at[:, None] * COLUMNS + column[None, :]
    AREA: tl.constexpr = K * COLUMNS
    eye = (key_at[:, None] == local[None, :]) & is_own[None, :]
    if LINKED:
        state = tl.load(starts + (segment * H + h) * AREA + state_at, mask=in_state, other=0.0)
    else:
        state = tl.where(eye, 1.0, 0.0)
    k += b * k_b + h * k_h
    if VALUE_TILES > 0:
        v += b * v_b + h * v_h
    beta += b * beta_b + h * beta_h
    since += b * s_b + h
    rest += b * s_b + h

    first = begin
    at = low.to(tl.int64) * H + h
    for _ in range(low, high):
        t = first + tl.arange(0, C)
        t64 = t.to(tl.int64)
        valid = t < end
        in_keys = valid[:, None] & in_key[None, :]
        keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=in_keys, other=0.0)
        summed = tl.load(since + t64 * s_t, mask=valid, other=0.0)
        after = tl.load(rest + t64 * s_t, mask=valid, other=0.0)
        rate = tl.load(beta + t64 * beta_t, mask=valid, other=0.0)
        block = block_number(t, start, W, WINDOW)
        last = tl.minimum(first + C, end) - 1
        total = tl.exp(tl.load(since + last.to(tl.int64) * s_t))
        faded = tl.exp(summed)
        rounded = state.to(dtype)
        if SAVE:
            kept = in_state & (first > begin) if SPANS else in_state
            tl.store(states + at * AREA + state_at, rounded, mask=kept)
        read = tl.dot(keys, rounded, input_precision=PRECISION)
        if WINDOW:
            before = block_number(tl.maximum(first - 1, start), start, W, WINDOW)
            closing = block_number(last, start, W, WINDOW)
            sees = block == before
            own = valid[:, None] & is_own[None, :]
            key_columns = tl.zeros([C, BV], tl.float32)
            if TRANSITION:
                key_columns = tl.load(k + t64[:, None] * k_t + local[None, :], mask=own, other=0.0).to(tl.float32)
            read = tl.where(sees[:, None], read, key_columns)
        y = -faded[:, None] * read
        if VALUE_TILES > 0:
            in_values = valid[:, None] & is_written[None, :]
            y += tl.load(v + t64[:, None] * v_t + local[None, :], mask=in_values, other=0.0).to(tl.float32)
        places = tl.arange(0, C)
        solve = tl.load(inverse + at * C * C + places[:, None] * C + places[None, :])
        z = tl.dot(solve, y.to(dtype), input_precision=PRECISION)
        if SAVE:
            to = written + at * C * COLUMNS + places[:, None] * COLUMNS + column[None, :]
            tl.store(to, z.to(dtype), mask=tl.broadcast_to(in_width[None, :], [C, BV]))
        x = rate[:, None] * z
        if OUTPUT:
            queries = tl.load(q + b * q_b + h * q_h + t64[:, None] * q_t + key_at[None, :], mask=in_keys, other=0.0)
            answer = tl.dot(queries, rounded, input_precision=PRECISION)
            if WINDOW:
                query_columns = tl.zeros([C, BV], tl.float32)
                if TRANSITION:
                    query_columns = tl.load(
                        q + b * q_b + h * q_h + t64[:, None] * q_t + local[None, :], mask=own, other=0.0
                    ).to(tl.float32)
                answer = tl.where(sees[:, None], answer, query_columns)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            scores *= decays(summed, t, valid, block, False)
            answer = faded[:, None] * answer + tl.dot(scores.to(dtype), x.to(dtype), input_precision=PRECISION)
            answer *= scale
            if VALUE_TILES > 0 and OUTPUT == 1:
                to = out + b * o_b + h * o_h + t64[:, None] * o_t + local[None, :]
                tl.store(to, answer.to(out.dtype.element_ty), mask=in_values)
            if TRANSITION:
                to = pulled + b * p_b + h * p_h + t64[:, None] * p_t + local[None, :]
                tl.store(to, answer.to(pulled.dtype.element_ty), mask=valid[:, None] & is_own[None, :])
        added = x * tl.exp(after)[:, None]
        if WINDOW:
            added = tl.where((block == closing)[:, None], added, 0.0)
            state = tl.where(closing == before, state, tl.where(eye, 1.0, 0.0))
        state = total * state + tl.dot(tl.trans(keys), added.to(dtype), input_precision=PRECISION)

        first += C
        at += H

    if ENDS == 2:
        final = first >= end
        if SPANS:
            final = (tl.load(segments + segment * 4 + 3) & 2) == 0
        tl.store(ends + (sequence * H + h) * AREA + state_at, state, mask=in_state & final)
    if ENDS == 1:
        tl.store(ends + (segment * H + h) * AREA + state_at, state, mask=in_state)


@triton.jit
def link_kernel(
    initial, maps, ends, starts, segments, sequences, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VALUE_TILES: tl.constexpr,
    TILES: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr, SEED: tl.constexpr, STRIDE: tl.constexpr,
    MAP_AT: tl.constexpr, END_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states at which segments start, from the maps of the segments of one sequence, one head, a tile of columns.

    A segment's map M is [K, K] at column MAP_AT of maps [segments, H, K, STRIDE]. REVERSE runs from the last segment to
    the first with M^T (cotangents). Where a window block begins inside, the end state does not depend on the start.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    h = (program // TILES) % H
    sequence = program // TILES // H
    low = tl.load(sequences + sequence * 4)
    high = tl.load(sequences + sequence * 4 + 1)
    TRANSITION: tl.constexpr = TILES > VALUE_TILES
    COLUMNS: tl.constexpr = V + K if TRANSITION else V
    if TRANSITION:
        is_value = tile < VALUE_TILES
        local = tl.where(is_value, tile, tile - VALUE_TILES) * BV + tl.arange(0, BV)
        is_own = local < tl.where(is_value, 0, K)
        is_written = local < tl.where(is_value, V, 0)
        column = local + tl.where(is_value, 0, V)
    else:
        local = tile * BV + tl.arange(0, BV)
        is_written = local < V
        is_own = local < 0
        column = local
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    in_state = in_key[:, None] & (is_own | is_written)[None, :]
    state_at = key_at[:, None] * COLUMNS + column[None, :]
    AREA: tl.constexpr = K * COLUMNS
    if INITIAL:
        state = tl.load(initial + (sequence * H + h) * AREA + state_at, mask=in_state, other=0.0)
    else:
        state = tl.zeros([BK, BV], tl.float32)
    if SEED:
        state += tl.where((key_at[:, None] == local[None, :]) & is_own[None, :] & in_key[:, None], 1.0, 0.0)
    in_map = in_key[:, None] & in_key[None, :]
    if REVERSE:
        map_at = MAP_AT + key_at[None, :] * STRIDE + key_at[:, None]
        segment = high.to(tl.int64) - 1
        step = -1
    else:
        map_at = MAP_AT + key_at[:, None] * STRIDE + key_at[None, :]
        segment = low.to(tl.int64)
        step = 1
    for _ in range(low, high - 1):
        tl.store(starts + (segment * H + h) * AREA + state_at, state, mask=in_state)
        reset = tl.load(segments + segment * 4 + 3) != 0
        transition = tl.load(maps + (segment * H + h) * K * STRIDE + map_at, mask=in_map & ~reset, other=0.0)
        # without a reset the ends of transition columns are the map itself, not something added to it
        taken = in_state & (is_written[None, :] | reset)
        end_at = (segment * H + h) * K * END_STRIDE + key_at[:, None] * END_STRIDE + column[None, :]
        added = tl.load(ends + end_at, mask=taken, other=0.0)
        state = added + tl.dot(transition, state, input_precision=PRECISION)
        segment += step
    tl.store(starts + (segment * H + h) * AREA + state_at, state, mask=in_state)
