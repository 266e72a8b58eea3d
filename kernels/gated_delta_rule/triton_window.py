"""Triton: the part of an exact window that reaches into the block before, see kernels/blocks.py.

    o_t += sum over j of the block before t's, j > t - w, of (q~_t . k~_j) v_j

A query chunk's left edge t - w + 1 falls into two key chunks, which are read token by token; whatever of the block lies
behind them is one matrix R_c, the sum of k~_j v_j^T over the block's tokens from chunk c on. With

    ahead = ceil((w - 1) / C)

query chunk c reads key chunks c - ahead and c - ahead + 1 and R_{c - ahead + 2}. The cotangents run the same way: key
chunk c is read by query chunks c + ahead and c + ahead - 1, and R_c by query chunk c + ahead - 2.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["W"])
def tail_states_kernel(
    left, right, out, chunks, blocks, sequences,
    l_b, l_t, l_h, r_b, r_t, r_h, H, W, ahead,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEY_TILES: tl.constexpr, VALUE_TILES: tl.constexpr, COTANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One window block, one head, one tile: R_c = sum of left_j right_j^T from the block's last chunk to its first.

    COTANGENT: the sum over chunks up to c of left_i right_i^T (q~ and do) of the query chunk that reads R_c, where i is
    in the block after this one: the cotangent of each k~_j v_j^T of chunk c.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program % (KEY_TILES * VALUE_TILES)).to(tl.int32)
    h = (program // (KEY_TILES * VALUE_TILES)) % H
    row = program // (KEY_TILES * VALUE_TILES) // H
    low = tl.load(blocks + row * 4).to(tl.int64)
    high = tl.load(blocks + row * 4 + 1).to(tl.int64)
    number = tl.load(blocks + row * 4 + 2)
    sequence = tl.load(blocks + row * 4 + 3).to(tl.int64)
    chunk_end = tl.load(sequences + sequence * 4 + 3).to(tl.int64)
    key_at = (tile // VALUE_TILES) * BK + tl.arange(0, BK)
    column = (tile % VALUE_TILES) * BV + tl.arange(0, BV)
    in_key = key_at < K
    in_width = column < V
    state = tl.zeros([BK, BV], tl.float32)
    place = tl.arange(0, C)
    to = out + key_at[:, None] * V + column[None, :]
    if COTANGENT:
        chunk = low
        wanted = number + 1
    else:
        chunk = high - 1
        wanted = number
    for _ in range(low, high):
        source = chunk + ahead - 2 if COTANGENT else chunk
        exists = source < chunk_end
        entry = chunks + tl.minimum(source, chunk_end - 1) * 4
        b = tl.load(entry).to(tl.int64)
        t = tl.load(entry + 1) + place
        start = tl.load(entry + 2)
        valid = (t < tl.load(entry + 3)) & ((t - start) // W == wanted) & exists
        t64 = t.to(tl.int64)
        at = left + b * l_b + h * l_h + t64[None, :] * l_t + key_at[:, None]
        rows = tl.load(at, mask=in_key[:, None] & valid[None, :], other=0.0)
        at = right + b * r_b + h * r_h + t64[:, None] * r_t + column[None, :]
        values = tl.load(at, mask=valid[:, None] & in_width[None, :], other=0.0).to(rows.dtype)
        state += tl.dot(rows, values, input_precision=PRECISION)
        rounded = state.to(out.dtype.element_ty)
        tl.store(to + (chunk * H + h) * K * V, rounded, mask=in_key[:, None] & in_width[None, :])
        if COTANGENT:
            chunk += 1
        else:
            chunk -= 1


@triton.jit
def in_tail(i, j, start, end, W):
    """[j, i] or [i, j], as the operands broadcast: query i reads key j of the block before its own."""
    own, other = (i - start) // W, (j - start) // W
    return (own == other + 1) & (i - j < W) & (j >= start) & (i < end)


@triton.jit(do_not_specialize=["W"])
def tail_kernel(
    pulled, carried, v, sums, out, chunks, sequences,
    p_b, p_t, p_h, v_b, v_t, v_h, o_b, o_t, o_h, H, W, ahead,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
    SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tail to out: one query chunk, one head, one tile of values."""
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    h = (program // TILES) % H
    chunk = program // TILES // H
    b = tl.load(chunks + chunk * 4).to(tl.int64)
    first = tl.load(chunks + chunk * 4 + 1)
    start = tl.load(chunks + chunk * 4 + 2)
    end = tl.load(chunks + chunk * 4 + 3)
    place = tl.arange(0, C)
    t = first + place
    t64 = t.to(tl.int64)
    column = tile * BV + tl.arange(0, BV)
    in_width = column < V
    pulled += b * p_b + h * p_h
    carried += b * p_b + h * p_h
    v += b * v_b + h * v_h
    acc = tl.zeros([C, BV], tl.float32)
    if tl.minimum(first + C, end) - start > W:
        for edge in tl.static_range(2):
            s = first + (edge - ahead) * C + place
            s64 = s.to(tl.int64)
            here = (s >= start) & (s < end)
            scores = tl.zeros([C, C], tl.float32)
            for at in range(0, K, BK):
                key_at = at + tl.arange(0, BK)
                in_key = key_at < K
                queries = tl.load(
                    pulled + t64[:, None] * p_t + key_at[None, :], mask=(t < end)[:, None] & in_key[None, :], other=0.0
                )
                keys = tl.load(
                    carried + s64[:, None] * p_t + key_at[None, :], mask=here[:, None] & in_key[None, :], other=0.0
                )
                scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            values = tl.load(
                v + s64[:, None] * v_t + column[None, :], mask=here[:, None] & in_width[None, :], other=0.0
            )
            scores = tl.where(in_tail(t[:, None], s[None, :], start, end, W), scores, 0.0)
            acc += tl.dot(scores.to(values.dtype), values, input_precision=PRECISION)
        if SUMS:
            after = first + (2 - ahead) * C
            uses = (after >= start) & ((t - start) // W - 1 == (tl.maximum(after, start) - start) // W)
            acc_sums = tl.zeros([C, BV], tl.float32)
            for at in range(0, K, BK):
                key_at = at + tl.arange(0, BK)
                in_key = key_at < K
                queries = tl.load(
                    pulled + t64[:, None] * p_t + key_at[None, :],
                    mask=(uses & (t < end))[:, None] & in_key[None, :], other=0.0,
                )  # fmt: skip
                beyond = tl.load(
                    sums + ((chunk + 2 - ahead) * H + h) * K * V + key_at[:, None] * V + column[None, :],
                    mask=in_key[:, None] & in_width[None, :] & (after >= start), other=0.0,
                )  # fmt: skip
                acc_sums += tl.dot(queries, beyond, input_precision=PRECISION)
            acc += acc_sums
        to = out + b * o_b + h * o_h + t64[:, None] * o_t + column[None, :]
        inside = (t < end)[:, None] & in_width[None, :]
        acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["W"])
def tail_query_gradient_kernel(
    carried, v, do, sums, d_pulled, chunks,
    p_b, p_t, p_h, v_b, v_t, v_h, do_b, do_t, do_h, H, W, ahead,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
    SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangent of q~: one query chunk, one head, one tile of keys."""
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    h = (program // TILES) % H
    chunk = program // TILES // H
    b = tl.load(chunks + chunk * 4).to(tl.int64)
    first = tl.load(chunks + chunk * 4 + 1)
    start = tl.load(chunks + chunk * 4 + 2)
    end = tl.load(chunks + chunk * 4 + 3)
    place = tl.arange(0, C)
    t = first + place
    t64 = t.to(tl.int64)
    key_at = tile * BK + tl.arange(0, BK)
    in_key = key_at < K
    carried += b * p_b + h * p_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    dtype = carried.dtype.element_ty
    acc = tl.zeros([C, BK], tl.float32)
    if tl.minimum(first + C, end) - start > W:
        for edge in tl.static_range(2):
            s = first + (edge - ahead) * C + place
            s64 = s.to(tl.int64)
            here = (s >= start) & (s < end)
            scores = tl.zeros([C, C], tl.float32)
            for at in range(0, V, BV):
                column = at + tl.arange(0, BV)
                in_width = column < V
                dout = tl.load(
                    do + t64[:, None] * do_t + column[None, :], mask=(t < end)[:, None] & in_width[None, :], other=0.0
                ).to(dtype)
                values = tl.load(
                    v + s64[:, None] * v_t + column[None, :], mask=here[:, None] & in_width[None, :], other=0.0
                )
                scores += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
            keys = tl.load(
                carried + s64[:, None] * p_t + key_at[None, :], mask=here[:, None] & in_key[None, :], other=0.0
            )
            scores = tl.where(in_tail(t[:, None], s[None, :], start, end, W), scores, 0.0)
            acc += tl.dot(scores.to(dtype), keys, input_precision=PRECISION)
        if SUMS:
            after = first + (2 - ahead) * C
            uses = (after >= start) & ((t - start) // W - 1 == (tl.maximum(after, start) - start) // W)
            acc_sums = tl.zeros([C, BK], tl.float32)
            for at in range(0, V, BV):
                column = at + tl.arange(0, BV)
                in_width = column < V
                dout = tl.load(
                    do + t64[:, None] * do_t + column[None, :],
                    mask=(uses & (t < end))[:, None] & in_width[None, :], other=0.0,
                ).to(dtype)  # fmt: skip
                beyond = tl.load(
                    sums + ((chunk + 2 - ahead) * H + h) * K * V + key_at[None, :] * V + column[:, None],
                    mask=in_width[:, None] & in_key[None, :] & (after >= start), other=0.0,
                )  # fmt: skip
                acc_sums += tl.dot(dout, beyond, input_precision=PRECISION)
            acc += acc_sums
    to = d_pulled + b * p_b + h * p_h + t64[:, None] * p_t + key_at[None, :]
    tl.store(to, acc.to(dtype), mask=(t < end)[:, None] & in_key[None, :])


@triton.jit(do_not_specialize=["W"])
def tail_key_gradient_kernel(
    pulled, carried, v, do, d_sums, d_last, d_carried, dv, chunks,
    p_b, p_t, p_h, v_b, v_t, v_h, do_b, do_t, do_h, dv_b, dv_t, dv_h, H, W, ahead, sequence_of,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangents of k~ and of the tail's values: one key chunk, one head.

    d_last [sequences, H, K, V] is the cotangent of the sum that the last state of a sequence takes from the block
    before its last; sequence_of [chunks] numbers the sequences.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // H, program % H
    b = tl.load(chunks + chunk * 4).to(tl.int64)
    first = tl.load(chunks + chunk * 4 + 1)
    start = tl.load(chunks + chunk * 4 + 2)
    end = tl.load(chunks + chunk * 4 + 3)
    sequence = tl.load(sequence_of + chunk).to(tl.int64)
    place = tl.arange(0, C)
    s = first + place
    s64 = s.to(tl.int64)
    here = s < end
    block = (s - start) // W
    pulled += b * p_b + h * p_h
    carried += b * p_b + h * p_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    dv += b * dv_b + h * dv_h
    dtype = carried.dtype.element_ty
    # the tokens whose k~_j v_j^T are in sums (all of the block the chunk begins in), and in the last state
    summed = here & (block == (first - start) // W)
    final = (end - 1 - start) // W
    held = here & (block + 1 == final) & (s >= end - W)
    near = end - first < W + C

    for at in range(0, V, BV):
        column = at + tl.arange(0, BV)
        in_width = column < V
        acc = tl.zeros([C, BV], tl.float32)
        for edge in tl.static_range(2):
            t = first + (ahead - edge) * C + place
            t64 = t.to(tl.int64)
            there = (t >= start) & (t < end)
            scores = tl.zeros([C, C], tl.float32)
            for key_from in range(0, K, BK):
                key_at = key_from + tl.arange(0, BK)
                in_key = key_at < K
                keys = tl.load(
                    carried + s64[:, None] * p_t + key_at[None, :], mask=here[:, None] & in_key[None, :], other=0.0
                )
                queries = tl.load(
                    pulled + t64[:, None] * p_t + key_at[None, :], mask=there[:, None] & in_key[None, :], other=0.0
                )
                scores += tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            dout = tl.load(
                do + t64[:, None] * do_t + column[None, :], mask=there[:, None] & in_width[None, :], other=0.0
            ).to(dtype)
            scores = tl.where(in_tail(t[None, :], s[:, None], start, end, W) & here[:, None], scores, 0.0)
            acc += tl.dot(scores.to(dtype), dout, input_precision=PRECISION)
        for key_from in range(0, K, BK):
            key_at = key_from + tl.arange(0, BK)
            in_key = key_at < K
            tile = key_at[:, None] * V + column[None, :]
            in_tile = in_key[:, None] & in_width[None, :]
            if SUMS:
                keys = tl.load(
                    carried + s64[:, None] * p_t + key_at[None, :], mask=summed[:, None] & in_key[None, :], other=0.0
                )
                beyond = tl.load(d_sums + program * K * V + tile, mask=in_tile, other=0.0)
                acc += tl.dot(keys, beyond, input_precision=PRECISION)
            keys = tl.load(
                carried + s64[:, None] * p_t + key_at[None, :], mask=held[:, None] & in_key[None, :], other=0.0
            )
            beyond = tl.load(d_last + (sequence * H + h) * K * V + tile, mask=in_tile & near, other=0.0)
            acc += tl.dot(keys, beyond.to(dtype), input_precision=PRECISION)
        tl.store(dv + s64[:, None] * dv_t + column[None, :], acc.to(dtype), mask=here[:, None] & in_width[None, :])

    for key_from in range(0, K, BK):
        key_at = key_from + tl.arange(0, BK)
        in_key = key_at < K
        acc = tl.zeros([C, BK], tl.float32)
        for edge in tl.static_range(2):
            t = first + (ahead - edge) * C + place
            t64 = t.to(tl.int64)
            there = (t >= start) & (t < end)
            scores = tl.zeros([C, C], tl.float32)
            for at in range(0, V, BV):
                column = at + tl.arange(0, BV)
                in_width = column < V
                values = tl.load(
                    v + s64[:, None] * v_t + column[None, :], mask=here[:, None] & in_width[None, :], other=0.0
                )
                dout = tl.load(
                    do + t64[:, None] * do_t + column[None, :], mask=there[:, None] & in_width[None, :], other=0.0
                ).to(dtype)
                scores += tl.dot(values, tl.trans(dout), input_precision=PRECISION)
            queries = tl.load(
                pulled + t64[:, None] * p_t + key_at[None, :], mask=there[:, None] & in_key[None, :], other=0.0
            )
            scores = tl.where(in_tail(t[None, :], s[:, None], start, end, W) & here[:, None], scores, 0.0)
            acc += tl.dot(scores.to(dtype), queries, input_precision=PRECISION)
        for at in range(0, V, BV):
            column = at + tl.arange(0, BV)
            in_width = column < V
            tile = key_at[None, :] * V + column[:, None]
            in_tile = in_width[:, None] & in_key[None, :]
            if SUMS:
                values = tl.load(
                    v + s64[:, None] * v_t + column[None, :], mask=summed[:, None] & in_width[None, :], other=0.0
                )
                beyond = tl.load(d_sums + program * K * V + tile, mask=in_tile, other=0.0)
                acc += tl.dot(values, beyond, input_precision=PRECISION)
            values = tl.load(
                v + s64[:, None] * v_t + column[None, :], mask=held[:, None] & in_width[None, :], other=0.0
            )
            beyond = tl.load(d_last + (sequence * H + h) * K * V + tile, mask=in_tile & near, other=0.0)
            acc += tl.dot(values, beyond.to(dtype), input_precision=PRECISION)
        to = d_carried + b * p_b + h * p_h + s64[:, None] * p_t + key_at[None, :]
        tl.store(to, acc.to(dtype), mask=here[:, None] & in_key[None, :])


@triton.jit(do_not_specialize=["W"])
def last_sum_kernel(
    carried, v, sums, out, chunks, sequences,
    p_b, p_t, p_h, v_b, v_t, v_h, H, W,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KEY_TILES: tl.constexpr, VALUE_TILES: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of k~_j v_j^T over what the last token's window holds of the block before the last, float32."""
    program = tl.program_id(0).to(tl.int64)
    tile = (program % (KEY_TILES * VALUE_TILES)).to(tl.int32)
    h = (program // (KEY_TILES * VALUE_TILES)) % H
    sequence = program // (KEY_TILES * VALUE_TILES) // H
    chunk = tl.load(sequences + sequence * 4 + 2).to(tl.int64)
    b = tl.load(chunks + chunk * 4).to(tl.int64)
    start = tl.load(chunks + chunk * 4 + 2)
    end = tl.load(chunks + chunk * 4 + 3)
    key_at = (tile // VALUE_TILES) * BK + tl.arange(0, BK)
    column = (tile % VALUE_TILES) * BV + tl.arange(0, BV)
    in_key = key_at < K
    in_width = column < V
    wanted = (end - 1 - start) // W - 1
    edge = tl.maximum(end - W - start, 0) // C
    acc = tl.zeros([BK, BV], tl.float32)
    for more in tl.static_range(2):
        s = start + (edge + more) * C + tl.arange(0, C)
        s64 = s.to(tl.int64)
        here = (s < end) & (s >= end - W) & ((s - start) // W == wanted)
        at = carried + b * p_b + h * p_h + s64[None, :] * p_t + key_at[:, None]
        keys = tl.load(at, mask=in_key[:, None] & here[None, :], other=0.0)
        at = v + b * v_b + h * v_h + s64[:, None] * v_t + column[None, :]
        values = tl.load(at, mask=here[:, None] & in_width[None, :], other=0.0)
        acc += tl.dot(keys, values, input_precision=PRECISION)
    inside = in_key[:, None] & in_width[None, :]
    if SUMS:
        after = (edge + 2) * C
        uses = (after < end - start) & (after // W == wanted)
        at = sums + ((chunk + edge + 2) * H + h) * K * V + key_at[:, None] * V + column[None, :]
        acc += tl.load(at, mask=inside & uses, other=0.0).to(tl.float32)
    tl.store(out + (sequence * H + h) * K * V + key_at[:, None] * V + column[None, :], acc, mask=inside)
