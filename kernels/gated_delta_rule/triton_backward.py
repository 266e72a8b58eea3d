"""Triton: scans of the state's cotangent, backwards in time, and the gradients of a chunk.

With dS' the cotangent of the state after a chunk (letters as in triton_forward.py)

    dx = P^T do + r (k dS'),    dy = (I + L diag(beta))^-T (beta dx),    dv = dy
    dS = exp(G_C) dS' + scale (e q)^T do - (e k)^T dy

and with Q = do z^T, E = -dy z^T, Y = z dS'^T, F_ij = beta_j exp(G_i - G_j) E_ij (j < i), masked like the decays D

    dq_i = scale (e_i S do_i + sum over j <= i of beta_j D_ij Q_ij k_j)
    dk_i = beta_i r_i Y_i - e_i S dy_i + ((F + F^T) k)_i + scale sum over j >= i of beta_i D_ji Q_ji q_j
    H    = P Q + L E (elementwise, Q_ii in, E_ii out)
    dbeta_j = sum over i of H_ij + r_j k_j . Y_j
    dg_t = sum over i >= t > j of beta_j H_ij + sum over i >= t of e_i (scale q_i . S do_i - k_i . S dy_i)
           + sum over j < t of beta_j r_j k_j . Y_j + exp(G_C) <S, dS'>

dbeta needs no division by beta because d(L diag(beta)) = -dy z^T. Each sum in dg runs only over the pairs that t lies
between: under strong decay a difference of full sums would be all rounding. All sums are linear in columns, so a
window's extra columns (triton_form.py) only add terms. No product takes the transpose of another product's result:
Q^T, E^T and (q k^T)^T are made directly or read from memory: Hopper's compiler has got such transposes wrong.
"""

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_factors import block_number, decays


@triton.jit(do_not_specialize=["W", "scale"])
def reverse_kernel(
    q, k, do, beta, since, rest, inverse, kept_scores, chunks, segments, starts, ends, cotangents, dy,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, beta_b, beta_t, beta_h, s_b, s_t, dy_b, dy_t, dy_h,
    H, W, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
    OWN: tl.constexpr, WINDOW: tl.constexpr, LINKED: tl.constexpr, READ: tl.constexpr, SAVE: tl.constexpr,
    STATES: tl.constexpr, ENDS: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One segment of one head, a tile of columns, last chunk first; `starts` is dS after the segment, `ends` before it.

    LINKED 1: starts is [segments, H, K, V], 2: [sequences, ...], read by a sequence's last segment; 0: nothing is read.
    OWN: dS is I at the end of every window block and no output is read, so that dy is k~ of kernels/blocks.py. READ:
    do is read; P is made, or taken from kept_scores [chunks, H, C, C]. ENDS 1: ends is [segments, H, K, V],
    2: [sequences, ...], written by a sequence's first segment, 0: not.
    SPANS: segments are spans, LINKED is 2, and cotangents known to be 0, behind spans but the last, are not written.
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
    column = tile * BV + tl.arange(0, BV)
    in_width = column < V
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    dtype = k.dtype.element_ty
    in_state = in_key[:, None] & in_width[None, :]
    state_at = key_at[:, None] * V + column[None, :]
    AREA: tl.constexpr = K * V
    eye = (key_at[:, None] == column[None, :]) & in_state
    if LINKED == 1:
        state = tl.load(starts + (segment * H + h) * AREA + state_at, mask=in_state, other=0.0)
    elif LINKED == 2:
        last_one = begin + (high - low) * C >= end
        if SPANS:
            last_one = (tl.load(segments + segment * 4 + 3) & 2) == 0
        state = tl.load(starts + (sequence * H + h) * AREA + state_at, mask=in_state & last_one, other=0.0)
    elif OWN:
        state = tl.where(eye, 1.0, 0.0)
    else:
        state = tl.zeros([BK, BV], tl.float32)
    k += b * k_b + h * k_h
    beta += b * beta_b + h * beta_h
    since += b * s_b + h
    rest += b * s_b + h
    first = begin + (high - low - 1) * C
    at = (high.to(tl.int64) - 1) * H + h
    places = tl.arange(0, C)
    transposed = places[None, :] * C + places[:, None]

    steps = high - low
    if OWN and ENDS == 1:
        # only where a block opens does the end of a segment depend on more than its map
        steps *= tl.load(segments + segment * 4 + 3)
    # Wide tiles read a chunk ahead by hand: two stages in shared memory would leave one program a multiprocessor. Tiles
    # of 16 and 32 columns do not need it and gave wrong results so on an H200 (Triton 3.6, the cause is not known).
    AHEAD: tl.constexpr = kept_scores is not None and BV >= 64
    if AHEAD:
        scores_there = tl.load(kept_scores + at * C * C + transposed)
        solve_there = tl.load(inverse + at * C * C + transposed)
    for step in range(0, steps):
        t = first + places
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
        if STATES:
            kept = in_state & (last_one | (first + C < end)) if SPANS else in_state
            tl.store(cotangents + at * AREA + state_at, rounded, mask=kept)
        dx = tl.dot(keys, rounded, input_precision=PRECISION)
        if WINDOW:
            before = block_number(tl.maximum(first - 1, start), start, W, WINDOW)
            closing = block_number(last, start, W, WINDOW)
            sees = block == before
            if OWN:
                own = valid[:, None] & in_width[None, :]
                key_columns = tl.load(k + t64[:, None] * k_t + column[None, :], mask=own, other=0.0).to(tl.float32)
                dx = tl.where((block == closing)[:, None], dx, key_columns)
            else:
                dx = tl.where((block == closing)[:, None], dx, 0.0)
            faded = tl.where(sees, faded, 0.0)
        dx *= tl.exp(after)[:, None]
        if READ:
            in_values = valid[:, None] & in_width[None, :]
            dout = tl.load(
                do + b * do_b + h * do_h + t64[:, None] * do_t + column[None, :], mask=in_values, other=0.0
            ).to(dtype)
            queries = tl.load(q + b * q_b + h * q_h + t64[:, None] * q_t + key_at[None, :], mask=in_keys, other=0.0)
            if kept_scores is None:
                scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                scores = (scores * (scale * decays(summed, t, valid, block, True))).to(dtype)
            elif not AHEAD:
                scores = tl.load(kept_scores + at * C * C + transposed)
            else:
                scores = scores_there
                ahead = (at - H) * C * C + transposed
                scores_there = tl.load(kept_scores + ahead, mask=step + 1 < steps, other=0.0)
            dx += tl.dot(scores, dout, input_precision=PRECISION)
        if not AHEAD:
            solve = tl.load(inverse + at * C * C + transposed)
        else:
            solve = solve_there
            solve_there = tl.load(inverse + ahead, mask=step + 1 < steps, other=0.0)
        solved = tl.dot(solve, (rate[:, None] * dx).to(dtype), input_precision=PRECISION)
        if SAVE:
            to = dy + b * dy_b + h * dy_h + t64[:, None] * dy_t + column[None, :]
            tl.store(to, solved.to(dy.dtype.element_ty), mask=valid[:, None] & in_width[None, :])
        if WINDOW:
            if OWN:
                # a block that closes inside the chunk carries back from I at its last token
                to_close = tl.sum(tl.where(t == start + (before + 1) * W - 1, summed, 0.0))
                state = tl.where(closing == before, state, tl.where(eye, 1.0, 0.0))
                total = tl.where(closing == before, total, tl.exp(to_close))
            else:
                state = tl.where(closing == before, state, 0.0)
        removed = (faded[:, None] * solved).to(dtype)
        state = total * state - tl.dot(tl.trans(keys), removed, input_precision=PRECISION)
        if READ:
            reading = (scale * faded[:, None] * dout.to(tl.float32)).to(dtype)
            state += tl.dot(tl.trans(queries), reading, input_precision=PRECISION)
        first -= C
        at -= H

    if ENDS == 2:
        tl.store(ends + (sequence * H + h) * AREA + state_at, state, mask=in_state & (begin == start))
    if ENDS == 1:
        tl.store(ends + (segment * H + h) * AREA + state_at, state, mask=in_state)
