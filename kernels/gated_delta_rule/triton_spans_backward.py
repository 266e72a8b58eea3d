"""Triton: gradients through an exact window's spans (triton_spans.py): two walks that leave what a chunk's needs.

Cotangents of state and transition come from triton_backward.py's scan once triton_spans_outputs.py has left q~'s. Here,
forwards over the keys, D the sum of do_i q~_i^T over the chunks before in the span that follows:

    d k~_j = sum over i within the edge of (v_j . do_i) q~_i + D^T v_j        (so for v with k~ in v's place)

The last state takes a sum over its window's tail: tokens j whose own reader lies behind the sequence's end add d_last.
d k~ runs on as the values of a forward walk from 0, as in triton_launch.py.
"""

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_spans import beyond_edge


@triton.jit(do_not_specialize=["W", "SPAN"])
def walk_keys_kernel(
    k, v, do, beta, since, rest, inverse, pulled, d_last, chunks, segments, states, written,
    k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, beta_b, beta_t, beta_h, s_b, s_t, p_b, p_t, p_h, H, W, SPAN,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span of one head: the forward walk with values d k~; states [chunks, H, K, K], written [chunks, H, C, K].

    The first chunk's state is 0 and not written.
    """
    program = tl.program_id(0).to(tl.int64)
    segment, h = program // H, program % H
    low = tl.load(segments + segment * 4)
    high = tl.load(segments + segment * 4 + 1)
    sequence = tl.load(segments + segment * 4 + 2).to(tl.int64)
    has_next = (tl.load(segments + segment * 4 + 3) & 2) != 0
    near = (tl.load(segments + segment * 4 + 3) & 4) != 0
    b = tl.load(chunks + low * 4).to(tl.int64)
    begin = tl.load(chunks + low * 4 + 1)
    end = tl.load(chunks + low * 4 + 3)
    next_end = end
    if has_next:
        next_end = tl.load(chunks + high * 4 + 3)
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    column = tl.arange(0, BV)
    in_width = column < V
    dtype = k.dtype.element_ty
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    beta += b * beta_b + h * beta_h
    since += b * s_b + h
    rest += b * s_b + h
    pulled += b * p_b + h * p_h
    place = tl.arange(0, C)
    in_map = in_key[:, None] & in_key[None, :]
    map_at = key_at[:, None] * K + key_at[None, :]
    state = tl.zeros([BK, BK], tl.float32)
    asked_of = tl.zeros([BV, BK], tl.float32)
    first = begin
    at = low.to(tl.int64) * H + h
    for _ in range(low, high):
        t = first + place
        t64 = t.to(tl.int64)
        valid = t < end
        in_keys = valid[:, None] & in_key[None, :]
        in_values = valid[:, None] & in_width[None, :]
        values = tl.load(v + t64[:, None] * v_t + column[None, :], mask=in_values, other=0.0)
        u = t + SPAN
        u64 = u.to(tl.int64)
        there = (u < next_end) & valid & has_next
        queries = tl.load(
            pulled + u64[:, None] * p_t + key_at[None, :], mask=there[:, None] & in_key[None, :], other=0.0
        )
        dout = tl.load(
            do + u64[:, None] * do_t + column[None, :], mask=there[:, None] & in_width[None, :], other=0.0
        ).to(dtype)
        pairs = tl.dot(values, tl.trans(dout), input_precision=PRECISION)
        pairs = tl.where(beyond_edge(u[None, :], t[:, None], begin, W, MANY), pairs, 0.0)
        d_keys = tl.dot(pairs.to(dtype), queries, input_precision=PRECISION)
        if MANY:
            queries = tl.load(pulled + t64[:, None] * p_t + key_at[None, :], mask=in_keys, other=0.0)
            dout = tl.load(do + t64[:, None] * do_t + column[None, :], mask=in_values, other=0.0).to(dtype)
            pairs = tl.dot(values, tl.trans(dout), input_precision=PRECISION)
            pairs = tl.where(beyond_edge(t[None, :], t[:, None], begin, W, True), pairs, 0.0)
            d_keys += tl.dot(pairs.to(dtype), queries, input_precision=PRECISION)
        if not SINGLE:
            d_keys += tl.dot(values, asked_of.to(dtype), input_precision=PRECISION)
            asked_of += tl.dot(tl.trans(dout), queries, input_precision=PRECISION)
        if near:
            held = held_by_last(t, begin, end, next_end, W, has_next, MANY)
            used = tl.load(v + t64[:, None] * v_t + column[None, :], mask=held[:, None] & in_width[None, :], other=0.0)
            at_last = d_last + (sequence * H + h) * K * V + key_at[None, :] * V + column[:, None]
            cotangent = tl.load(at_last, mask=in_width[:, None] & in_key[None, :], other=0.0).to(dtype)
            d_keys += tl.dot(used, cotangent, input_precision=PRECISION)

        keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=in_keys, other=0.0)
        summed = tl.load(since + t64 * s_t, mask=valid, other=0.0)
        after = tl.load(rest + t64 * s_t, mask=valid, other=0.0)
        rate = tl.load(beta + t64 * beta_t, mask=valid, other=0.0)
        solve = tl.load(inverse + at * C * C + place[:, None] * C + place[None, :])
        rounded = state.to(dtype)
        tl.store(states + at * K * K + map_at, rounded, mask=in_map & (first > begin))
        if not SINGLE:
            d_keys -= tl.exp(summed)[:, None] * tl.dot(keys, rounded, input_precision=PRECISION)
        z = tl.dot(solve, d_keys.to(dtype), input_precision=PRECISION)
        to = written + at * C * K + place[:, None] * K + key_at[None, :]
        tl.store(to, z.to(dtype), mask=tl.broadcast_to(in_key[None, :], [C, BK]))
        if not SINGLE:
            last = tl.minimum(first + C, end) - 1
            total = tl.exp(tl.load(since + last.to(tl.int64) * s_t))
            added = ((rate * tl.exp(after))[:, None] * z).to(dtype)
            state = total * state + tl.dot(tl.trans(keys), added, input_precision=PRECISION)
        first += C
        at += H


@triton.jit
def held_by_last(t, begin, end, next_end, W, has_next, MANY: tl.constexpr):
    """Tokens t of this span that the last token's window holds and that lie in the block before the last token's."""
    whole_end = tl.where(has_next, next_end, end)
    held = (t < end) & (t >= whole_end - W)
    if MANY:
        return held & ((t - begin) // W + 1 == (whole_end - 1 - begin) // W)
    else:
        return held & has_next


@triton.jit(do_not_specialize=["W", "SPAN"])
def tail_values_kernel(
    carried, pulled, do, d_last, chunks, segments, dv,
    do_b, do_t, do_h, dv_b, dv_t, dv_h, p_b, p_t, p_h, H, W, SPAN,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span of one head: the values' gradient through the tail."""
    program = tl.program_id(0).to(tl.int64)
    segment, h = program // H, program % H
    low = tl.load(segments + segment * 4)
    high = tl.load(segments + segment * 4 + 1)
    sequence = tl.load(segments + segment * 4 + 2).to(tl.int64)
    has_next = (tl.load(segments + segment * 4 + 3) & 2) != 0
    near = (tl.load(segments + segment * 4 + 3) & 4) != 0
    b = tl.load(chunks + low * 4).to(tl.int64)
    begin = tl.load(chunks + low * 4 + 1)
    end = tl.load(chunks + low * 4 + 3)
    next_end = end
    if has_next:
        next_end = tl.load(chunks + high * 4 + 3)
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    column = tl.arange(0, BV)
    in_width = column < V
    dtype = carried.dtype.element_ty
    carried += b * p_b + h * p_h
    pulled += b * p_b + h * p_h
    do += b * do_b + h * do_h
    dv += b * dv_b + h * dv_h
    asked_of = tl.zeros([BK, BV], tl.float32)
    first = begin
    for _ in range(low, high):
        t = first + tl.arange(0, C)
        t64 = t.to(tl.int64)
        valid = t < end
        in_keys = valid[:, None] & in_key[None, :]
        in_values = valid[:, None] & in_width[None, :]
        keys = tl.load(carried + t64[:, None] * p_t + key_at[None, :], mask=in_keys, other=0.0)
        u = t + SPAN
        u64 = u.to(tl.int64)
        there = (u < next_end) & valid & has_next
        queries = tl.load(
            pulled + u64[:, None] * p_t + key_at[None, :], mask=there[:, None] & in_key[None, :], other=0.0
        )
        dout = tl.load(
            do + u64[:, None] * do_t + column[None, :], mask=there[:, None] & in_width[None, :], other=0.0
        ).to(dtype)
        pairs = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        pairs = tl.where(beyond_edge(u[None, :], t[:, None], begin, W, MANY), pairs, 0.0)
        acc = tl.dot(pairs.to(dtype), dout, input_precision=PRECISION)
        if MANY:
            queries = tl.load(pulled + t64[:, None] * p_t + key_at[None, :], mask=in_keys, other=0.0)
            dout = tl.load(do + t64[:, None] * do_t + column[None, :], mask=in_values, other=0.0).to(dtype)
            pairs = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            pairs = tl.where(beyond_edge(t[None, :], t[:, None], begin, W, True), pairs, 0.0)
            acc += tl.dot(pairs.to(dtype), dout, input_precision=PRECISION)
        if not SINGLE:
            acc += tl.dot(keys, asked_of.to(dtype), input_precision=PRECISION)
            asked_of += tl.dot(tl.trans(queries), dout, input_precision=PRECISION)
        if near:
            held = held_by_last(t, begin, end, next_end, W, has_next, MANY)
            used = tl.load(
                carried + t64[:, None] * p_t + key_at[None, :], mask=held[:, None] & in_key[None, :], other=0.0
            )
            at_last = d_last + (sequence * H + h) * K * V + key_at[:, None] * V + column[None, :]
            cotangent = tl.load(at_last, mask=in_key[:, None] & in_width[None, :], other=0.0).to(dtype)
            acc += tl.dot(used, cotangent, input_precision=PRECISION)
        tl.store(dv + t64[:, None] * dv_t + column[None, :], acc.to(dv.dtype.element_ty), mask=in_values)
        first += C
