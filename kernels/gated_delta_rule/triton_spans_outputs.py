"""Triton: what a window's chunks put out once the scans have left their states: every chunk at once, nothing carried.

The equations are those of triton_spans.py; state, transition and written rows come from memory, and no program waits
for another chunk. Backwards, with the k~ and R that were kept:

    d q~_t = sum over j beyond the edge of (do_t . v_j) k~_j + R do_t
"""

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_factors import block_number, decays
from kernels.gated_delta_rule.triton_spans import beyond_edge


@triton.jit(do_not_specialize=["W", "SPAN", "scale"])
def outputs_kernel(
    q, k, v, beta, since, carried, sums, states, written, chunks, out, pulled,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, beta_b, beta_t, beta_h, s_b, s_t, o_b, o_t, o_h, p_b, p_t, p_h,
    H, W, SPAN, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, MANY: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. OUTPUT: out is written, tail included; SAVE: pulled (q~) is."""
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // H, program % H
    b = tl.load(chunks + chunk * 5).to(tl.int64)
    first = tl.load(chunks + chunk * 5 + 1)
    begin = tl.load(chunks + chunk * 5 + 2)
    end = tl.load(chunks + chunk * 5 + 3)
    has_before = (tl.load(chunks + chunk * 5 + 4) & 1) != 0
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    column = tl.arange(0, BV)
    in_width = column < V
    place = tl.arange(0, C)
    COLUMNS: tl.constexpr = V + K
    dtype = k.dtype.element_ty
    t = first + place
    t64 = t.to(tl.int64)
    valid = t < end
    in_keys = valid[:, None] & in_key[None, :]
    in_values = valid[:, None] & in_width[None, :]
    since += b * s_b + h
    v += b * v_b + h * v_h
    carried += b * p_b + h * p_h
    states += program * K * COLUMNS + key_at[:, None] * COLUMNS
    written += program * C * COLUMNS + place[:, None] * COLUMNS
    queries = tl.load(q + b * q_b + h * q_h + t64[:, None] * q_t + key_at[None, :], mask=in_keys, other=0.0)
    keys = tl.load(k + b * k_b + h * k_h + t64[:, None] * k_t + key_at[None, :], mask=in_keys, other=0.0)
    summed = tl.load(since + t64 * s_t, mask=valid, other=0.0)
    rate = tl.load(beta + b * beta_b + h * beta_h + t64 * beta_t, mask=valid, other=0.0)
    faded = tl.exp(summed)
    block = block_number(t, begin, W, MANY)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    # beta of the read token, so that written rows are taken as they lie in memory
    scores = (scores * rate[None, :] * decays(summed, t, valid, block, False)).to(dtype)
    inner = first > begin  # where a span begins the state is 0 and the transition I
    BRANCH: tl.constexpr = BK > 64 or C < 64  # else a mask is faster (measured)
    in_map = in_key[:, None] & in_key[None, :]
    asked = queries.to(tl.float32)
    if SINGLE:
        pass
    elif BRANCH:
        if inner:
            transition = tl.load(states + V + key_at[None, :], mask=in_map, other=0.0)
            asked = tl.dot(queries, transition, input_precision=PRECISION)
    else:
        transition = tl.load(states + V + key_at[None, :], mask=in_map & inner, other=0.0)
        transition = tl.where((key_at[:, None] == key_at[None, :]) & ~inner, 1.0, transition).to(dtype)
        asked = tl.dot(queries, transition, input_precision=PRECISION)
    asked *= faded[:, None]
    wrote = tl.load(written + V + key_at[None, :], mask=in_keys, other=0.0)
    asked += tl.dot(scores, wrote, input_precision=PRECISION)
    asked = (scale * asked).to(dtype)
    if SAVE:
        tl.store(pulled + b * p_b + h * p_h + t64[:, None] * p_t + key_at[None, :], asked, mask=in_keys)
    if OUTPUT:
        answer = tl.zeros([C, BV], tl.float32)
        in_state = in_key[:, None] & in_width[None, :]
        if SINGLE:
            pass
        elif BRANCH:
            if inner:
                state = tl.load(states + column[None, :], mask=in_state, other=0.0)
                answer = faded[:, None] * tl.dot(queries, state, input_precision=PRECISION)
        else:
            state = tl.load(states + column[None, :], mask=in_state & inner, other=0.0)
            answer = faded[:, None] * tl.dot(queries, state, input_precision=PRECISION)
        wrote = tl.load(written + column[None, :], mask=in_values, other=0.0)
        answer += tl.dot(scores, wrote, input_precision=PRECISION)
        answer *= scale
        for here in tl.static_range(2 if MANY else 1):
            s = t - SPAN if here == 0 else t
            s64 = s.to(tl.int64)
            exists = (s < begin) & has_before if here == 0 else valid
            rows = tl.load(
                carried + s64[:, None] * p_t + key_at[None, :], mask=exists[:, None] & in_key[None, :], other=0.0
            )
            values = tl.load(
                v + s64[:, None] * v_t + column[None, :], mask=exists[:, None] & in_width[None, :], other=0.0
            )
            pairs = tl.dot(asked, tl.trans(rows), input_precision=PRECISION)
            pairs = tl.where(beyond_edge(t[:, None], s[None, :], begin, W, MANY), pairs, 0.0)
            answer += tl.dot(pairs.to(dtype), values, input_precision=PRECISION)
        if not SINGLE:
            full = (SPAN + C - 1) // C
            behind = has_before & ((first - begin) // C + 1 < full)
            at_sum = sums + (program - (full - 1) * H) * K * V + key_at[:, None] * V + column[None, :]
            total = tl.load(at_sum, mask=in_key[:, None] & in_width[None, :] & behind, other=0.0)
            answer += tl.dot(asked, total, input_precision=PRECISION)
        tl.store(
            out + b * o_b + h * o_h + t64[:, None] * o_t + column[None, :],
            answer.to(out.dtype.element_ty), mask=in_values,
        )  # fmt: skip


@triton.jit(do_not_specialize=["W", "SPAN"])
def pulled_gradient_kernel(
    v, do, carried, sums, chunks, d_pulled,
    v_b, v_t, v_h, do_b, do_t, do_h, p_b, p_t, p_h, H, W, SPAN,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangent of q~, one chunk of one head."""
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // H, program % H
    b = tl.load(chunks + chunk * 5).to(tl.int64)
    first = tl.load(chunks + chunk * 5 + 1)
    begin = tl.load(chunks + chunk * 5 + 2)
    end = tl.load(chunks + chunk * 5 + 3)
    has_before = (tl.load(chunks + chunk * 5 + 4) & 1) != 0
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    column = tl.arange(0, BV)
    in_width = column < V
    dtype = carried.dtype.element_ty
    t = first + tl.arange(0, C)
    t64 = t.to(tl.int64)
    valid = t < end
    v += b * v_b + h * v_h
    carried += b * p_b + h * p_h
    in_values = valid[:, None] & in_width[None, :]
    dout = tl.load(do + b * do_b + h * do_h + t64[:, None] * do_t + column[None, :], mask=in_values, other=0.0)
    dout = dout.to(dtype)
    asked = tl.zeros([C, BK], tl.float32)
    for here in tl.static_range(2 if MANY else 1):
        s = t - SPAN if here == 0 else t
        s64 = s.to(tl.int64)
        exists = (s < begin) & has_before if here == 0 else valid
        rows = tl.load(
            carried + s64[:, None] * p_t + key_at[None, :], mask=exists[:, None] & in_key[None, :], other=0.0
        )
        values = tl.load(v + s64[:, None] * v_t + column[None, :], mask=exists[:, None] & in_width[None, :], other=0.0)
        pairs = tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        pairs = tl.where(beyond_edge(t[:, None], s[None, :], begin, W, MANY), pairs, 0.0)
        asked += tl.dot(pairs.to(dtype), rows, input_precision=PRECISION)
    if not SINGLE:
        full = (SPAN + C - 1) // C
        behind = has_before & ((first - begin) // C + 1 < full)
        at_sum = sums + (program - (full - 1) * H) * K * V + key_at[None, :] * V + column[:, None]
        total = tl.load(at_sum, mask=in_width[:, None] & in_key[None, :] & behind, other=0.0)
        asked += tl.dot(dout, total, input_precision=PRECISION)
    to = d_pulled + b * p_b + h * p_h + t64[:, None] * p_t + key_at[None, :]
    tl.store(to, asked.to(dtype), mask=valid[:, None] & in_key[None, :])
