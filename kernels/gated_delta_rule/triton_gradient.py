"""Triton: gradients of one chunk, from what the scans of triton_forward.py and triton_backward.py left behind.

The equations are in triton_backward.py; S do_i and S dy_i there are `asked` and `taken` here, Y is `kept`.
"""

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_factors import block_number, decays


@triton.jit
def add_pairs(
    pairs, pairs_t, x, x_t, z, z_t, t64, valid,
    WIDTH: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add x z^T (ROWS) and, made directly, its transpose (TRANSPOSED) over the columns of one group."""
    place = tl.arange(0, C)
    for at in range(0, WIDTH, BV):
        column = at + tl.arange(0, BV)
        inside = valid[:, None] & (column < WIDTH)[None, :]
        wrote = tl.load(z + place[:, None] * z_t + column[None, :], mask=inside, other=0.0)
        rows = tl.load(x + t64[:, None] * x_t + column[None, :], mask=inside, other=0.0).to(wrote.dtype)
        if ROWS:
            pairs += tl.dot(rows, tl.trans(wrote), input_precision=PRECISION)
        if TRANSPOSED:
            pairs_t += tl.dot(wrote, tl.trans(rows), input_precision=PRECISION)
    return pairs, pairs_t


@triton.jit
def add_states(
    asked, taken, kept, inner, do, do_t, dy, dy_t, z, z_t, states, states_t, cotangents, t64, valid, key_at, in_key,
    opens, closes,
    WIDTH: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, READ: tl.constexpr, TAKE: tl.constexpr,
    OPENS: tl.constexpr, CLOSES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add do S^T, dy S^T, z dS'^T [C, keys] and <S, dS'> over the columns of one group, for one tile of keys.

    OPENS: where `opens`, S is known and not read, 0 (OPENS 1) or I (OPENS 2); CLOSES: dS' where `closes`, likewise.
    """
    place = tl.arange(0, C)
    for at in range(0, WIDTH, BV):
        column = at + tl.arange(0, BV)
        inside = valid[:, None] & (column < WIDTH)[None, :]
        in_state = (column < WIDTH)[:, None] & in_key[None, :]
        eye = column[:, None] == key_at[None, :]
        state_there = in_state & ~opens if OPENS else in_state
        state = tl.load(states + key_at[None, :] * states_t + column[:, None], mask=state_there, other=0.0)
        if OPENS == 2:
            state = tl.where(eye & opens, 1.0, state).to(states.dtype.element_ty)
        if TAKE:
            wrote = tl.load(z + place[:, None] * z_t + column[None, :], mask=inside, other=0.0)
            solved = tl.load(dy + t64[:, None] * dy_t + column[None, :], mask=inside, other=0.0).to(wrote.dtype)
            cotangent_at = cotangents + key_at[None, :] * WIDTH + column[:, None]
            cotangent = tl.load(cotangent_at, mask=in_state & ~closes if CLOSES else in_state, other=0.0)
            if CLOSES == 2:
                cotangent = tl.where(eye & closes, 1.0, cotangent).to(cotangents.dtype.element_ty)
            taken += tl.dot(solved, state, input_precision=PRECISION)
            kept += tl.dot(wrote, cotangent, input_precision=PRECISION)
            inner += tl.sum(state.to(tl.float32) * cotangent.to(tl.float32))
        if READ:
            dout = tl.load(do + t64[:, None] * do_t + column[None, :], mask=inside, other=0.0).to(state.dtype)
            asked += tl.dot(dout, state, input_precision=PRECISION)
    return asked, taken, kept, inner


@triton.jit
def crossing(pairs, t, SCAN: tl.constexpr):
    """[C] sum over i >= t > j of pairs [i, j]: never a difference of sums over all i and over all j.

    Sums over i by a scan, which passes each number through the threads five times, or as a product with ones, in two
    bfloat16 parts, 16 bits in all.
    """
    if SCAN:
        ending = tl.cumsum(pairs, 0, reverse=True)
    else:
        counted = tl.where(t[:, None] <= t[None, :], 1.0, 0.0).to(tl.bfloat16)
        high = pairs.to(tl.bfloat16)
        ending = tl.dot(counted, high)
        ending = tl.dot(counted, (pairs - high.to(tl.float32)).to(tl.bfloat16), acc=ending)
    return tl.sum(tl.where(t[:, None] > t[None, :], ending, 0.0), axis=1)


@triton.jit(do_not_specialize=["W", "scale"])
def gradient_kernel(
    q, k, do, beta, since, rest, chunks, dy, written, states, cotangents,
    do_2, dy_2, cotangents_2, dy_3, written_3, states_3, cotangents_3, kept_scores, kept_pairs, dq, dk, dg,
    dbeta, tail_dv,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, beta_b, beta_t, beta_h, s_b, s_t, dy_b, dy_t, dy_h,
    x_b, x_t, x_h, H, W, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUPS: tl.constexpr,
    WINDOW: tl.constexpr, SPANS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SCAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of query, key, log_decay and beta in one chunk of one head.

    Column groups: values (do, dy, written, states, cotangents) and, with a window, pulled-back queries (do_2, dy_2; the
    same written and states, from column V on) and carried keys (dy_3, written_3, states_3). [B, T, H, K] tensors of
    ours, dq and dk among them, have strides x. GROUPS: there are the window's columns; WINDOW: blocks begin or end
    inside chunks; SPANS: chunks are those of spans, and what is known at a span's ends is not read. tail_dv, if given,
    gets dy added. QUERIES: dq and the pairs that are read, whose P [chunks, H, C, C] goes to kept_scores, if given;
    KEYS: dk and the others. QUERIES alone leaves for KEYS alone the pairs of dq in kept_pairs [chunks, H, C, C], and
    terms of dg and dbeta, to which KEYS adds its own.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // H, program % H
    ROW: tl.constexpr = 5 if SPANS else 4
    b = tl.load(chunks + chunk * ROW).to(tl.int64)
    first = tl.load(chunks + chunk * ROW + 1)
    start = tl.load(chunks + chunk * ROW + 2)
    end = tl.load(chunks + chunk * ROW + 3)
    opens = first == start
    ends = first + C >= end
    none_behind = ends
    if SPANS:
        none_behind = ends & ((tl.load(chunks + chunk * ROW + 4) & 2) != 0)
    ZERO: tl.constexpr = 1 if SPANS else 0
    UNIT: tl.constexpr = 2 if SPANS else 0
    COLUMNS: tl.constexpr = V + K if GROUPS else V
    place = tl.arange(0, C)
    t = first + place
    t64 = t.to(tl.int64)
    valid = t < end
    block = block_number(t, start, W, WINDOW)
    dtype = k.dtype.element_ty
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    do += b * do_b + h * do_h
    dy += b * dy_b + h * dy_h
    written += program * C * COLUMNS
    states += program * K * COLUMNS
    cotangents += program * K * V
    x_at = b * x_b + h * x_h
    if GROUPS:
        do_2 += x_at
        dy_2 += x_at
        dy_3 += x_at
        cotangents_2 += program * K * K
        cotangents_3 += program * K * K
        written_3 += program * C * K
        states_3 += program * K * K
    summed = tl.load(since + b * s_b + h + t64 * s_t, mask=valid, other=0.0)
    after = tl.load(rest + b * s_b + h + t64 * s_t, mask=valid, other=0.0)
    rate = tl.load(beta + b * beta_b + h * beta_h + t64 * beta_t, mask=valid, other=0.0)
    faded = tl.exp(summed)
    remaining = tl.exp(after)

    # queries' pairs first, then keys', so that three [C, C] sums are held at a time and not six
    later = t[:, None] > t[None, :]
    d_beta = tl.zeros([C], tl.float32)
    d_pairs = tl.zeros([C], tl.float32)
    BOTH: tl.constexpr = QUERIES and KEYS
    square = program * C * C
    read = tl.zeros([C, C], tl.float32)
    read_t = tl.zeros([C, C], tl.float32)
    if QUERIES:
        read, read_t = add_pairs(read, read_t, do, do_t, written, COLUMNS, t64, valid, V, C, BV, True, BOTH, PRECISION)
        if GROUPS:
            read, read_t = add_pairs(
                read, read_t, do_2, x_t, written + V, COLUMNS, t64, valid, K, C, BV, True, BOTH, PRECISION
            )
    if BOTH:
        decay = decays(summed, t, valid, block, True)
        to_keys = (scale * rate[:, None] * decay * read_t).to(dtype)
    elif KEYS:
        to_keys = tl.load(kept_pairs + square + place[None, :] * C + place[:, None])
    if QUERIES:
        scores = tl.zeros([C, C], tl.float32)
        for at in range(0, K, BK):
            key_at = at + tl.arange(0, BK)
            inside = valid[:, None] & (key_at < K)[None, :]
            keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=inside, other=0.0)
            queries = tl.load(q + t64[:, None] * q_t + key_at[None, :], mask=inside, other=0.0)
            scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weights = scale * decays(summed, t, valid, block, False)
        if kept_scores is not None:
            tl.store(kept_scores + square + place[:, None] * C + place[None, :], (scores * weights).to(dtype))
        read *= weights
        from_queries = (rate[None, :] * read).to(dtype)
        if not KEYS:
            tl.store(kept_pairs + square + place[:, None] * C + place[None, :], from_queries)
        read *= scores
        d_beta += tl.sum(read, axis=0)
        d_pairs += crossing(tl.where(later, read * rate[None, :], 0.0), t, SCAN)
    if KEYS:
        removed = tl.zeros([C, C], tl.float32)
        removed_t = tl.zeros([C, C], tl.float32)
        removed, removed_t = add_pairs(
            removed, removed_t, dy, dy_t, written, COLUMNS, t64, valid, V, C, BV, True, True, PRECISION
        )
        if GROUPS:
            removed, removed_t = add_pairs(
                removed, removed_t, dy_2, x_t, written + V, COLUMNS, t64, valid, K, C, BV, True, True, PRECISION
            )
            removed, removed_t = add_pairs(
                removed, removed_t, dy_3, x_t, written_3, K, t64, valid, K, C, BV, True, True, PRECISION
            )
        products = tl.zeros([C, C], tl.float32)
        for at in range(0, K, BK):
            key_at = at + tl.arange(0, BK)
            inside = valid[:, None] & (key_at < K)[None, :]
            keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=inside, other=0.0)
            products += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        removed_t = tl.where(t[:, None] < t[None, :], removed_t, 0.0) * rate[:, None]
        removed_t *= decays(summed, t, valid, block, True)
        removed = tl.where(later, removed, 0.0) * decays(summed, t, valid, block, False)
        among_keys = (-rate[None, :] * removed - removed_t).to(dtype)
        removed *= -products
        d_beta += tl.sum(removed, axis=0)
        d_pairs += crossing(removed * rate[None, :], t, SCAN)

    before = block_number(tl.maximum(first - 1, start), start, W, WINDOW)
    last = tl.minimum(first + C, end) - 1
    closing = block_number(last, start, W, WINDOW)
    sees = block == before
    closes = block == closing
    d_since = tl.zeros([C], tl.float32)
    d_rest = tl.zeros([C], tl.float32)
    inner = 0.0
    opened = 0.0
    closed = 0.0
    for at in range(0, K, BK):
        key_at = at + tl.arange(0, BK)
        in_key = key_at < K
        asked = tl.zeros([C, BK], tl.float32)
        taken = tl.zeros([C, BK], tl.float32)
        kept = tl.zeros([C, BK], tl.float32)
        asked, taken, kept, inner = add_states(
            asked, taken, kept, inner, do, do_t, dy, dy_t, written, COLUMNS, states, COLUMNS, cotangents, t64, valid,
            key_at, in_key, opens, none_behind, V, C, BV, QUERIES, KEYS, ZERO, ZERO, PRECISION,
        )  # fmt: skip
        inside = valid[:, None] & in_key[None, :]
        if GROUPS:
            asked, taken, kept, inner = add_states(
                asked, taken, kept, inner, do_2, x_t, dy_2, x_t, written + V, COLUMNS, states + V, COLUMNS,
                cotangents_2, t64, valid, key_at, in_key, opens, none_behind, K, C, BV, QUERIES, KEYS, UNIT, ZERO,
                PRECISION,
            )  # fmt: skip
            if KEYS:
                asked, taken, kept, inner = add_states(
                    asked, taken, kept, inner, do_2, x_t, dy_3, x_t, written_3, K, states_3, K, cotangents_3, t64,
                    valid, key_at, in_key, opens, ends, K, C, BV, False, True, ZERO, UNIT, PRECISION,
                )  # fmt: skip
        if WINDOW:
            # blocks that open or close inside the chunk start from I and end in I there
            x_here = t64[:, None] * x_t + key_at[None, :]
            own = inside & (~sees)[:, None]
            if QUERIES:
                asked = tl.where(sees[:, None], asked, tl.load(do_2 + x_here, mask=own, other=0.0).to(tl.float32))
            if KEYS:
                taken = tl.where(sees[:, None], taken, tl.load(dy_2 + x_here, mask=own, other=0.0).to(tl.float32))
                own = inside & (~closes)[:, None]
                here = tl.load(written_3 + place[:, None] * K + key_at[None, :], mask=own, other=0.0).to(tl.float32)
                kept = tl.where(closes[:, None], kept, here)
                from_next = in_key & ~none_behind if SPANS else in_key
                from_last = in_key & ~opens if SPANS else in_key
                opened += tl.sum(tl.load(cotangents_2 + key_at * K + key_at, mask=from_next, other=0.0).to(tl.float32))
                closed += tl.sum(tl.load(states_3 + key_at * K + key_at, mask=from_last, other=0.0).to(tl.float32))
        keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=inside, other=0.0)
        queries = tl.load(q + t64[:, None] * q_t + key_at[None, :], mask=inside, other=0.0)
        key_values = keys.to(tl.float32)
        if QUERIES:
            asked *= scale * faded[:, None]
            d_since += tl.sum(asked * queries.to(tl.float32), axis=1)
            asked += tl.dot(from_queries, keys, input_precision=PRECISION)
            tl.store(dq + x_at + t64[:, None] * x_t + key_at[None, :], asked.to(dq.dtype.element_ty), mask=inside)
        if KEYS:
            taken *= faded[:, None]
            kept *= remaining[:, None]
            d_since -= tl.sum(taken * key_values, axis=1)
            d_rest += tl.sum(kept * key_values, axis=1)
            kept = kept * rate[:, None] - taken
            kept += tl.dot(among_keys, keys, input_precision=PRECISION)
            kept += tl.dot(to_keys, queries, input_precision=PRECISION)
            tl.store(dk + x_at + t64[:, None] * x_t + key_at[None, :], kept.to(dk.dtype.element_ty), mask=inside)

    d_beta += d_rest
    d_rest *= rate
    one = block[:, None] == block[None, :]
    d_decay = d_pairs + tl.sum(tl.where(one & (t[None, :] >= t[:, None]), d_since[None, :], 0.0), axis=1)
    d_decay += tl.sum(tl.where(one & (t[None, :] < t[:, None]), d_rest[None, :], 0.0), axis=1)
    total = tl.exp(tl.load(since + b * s_b + h + last.to(tl.int64) * s_t))
    if WINDOW:
        to_close = tl.sum(tl.where(t == start + (before + 1) * W - 1, summed, 0.0))
        through = tl.where(closing == before, total * inner, 0.0)
        reset = tl.where(closing == before, 0.0, 1.0)
        d_decay += through + reset * tl.where(closes, total * opened, 0.0)
        d_decay += reset * tl.where(sees, tl.exp(to_close) * closed, 0.0)
    else:
        d_decay += total * inner
    at = b * s_b + h + t64 * s_t
    if not QUERIES:
        d_decay += tl.load(dg + at, mask=valid, other=0.0)
        d_beta += tl.load(dbeta + at, mask=valid, other=0.0)
    tl.store(dg + at, d_decay, mask=valid)
    tl.store(dbeta + at, d_beta, mask=valid)
    if KEYS and tail_dv is not None:
        to = b * dy_b + h * dy_h + t64[:, None] * dy_t
        for at_column in range(0, V, BV):
            column = at_column + tl.arange(0, BV)
            inside = valid[:, None] & (column < V)[None, :]
            solved = tl.load(dy - b * dy_b - h * dy_h + to + column[None, :], mask=inside, other=0.0).to(tl.float32)
            solved += tl.load(tail_dv + to + column[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(tail_dv + to + column[None, :], solved.to(tail_dv.dtype.element_ty), mask=inside)
