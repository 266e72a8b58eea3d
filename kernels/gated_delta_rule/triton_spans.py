"""Triton: an exact window walked span by span: carried keys and their sums; the last state's share of the tail.

A span is one window block cut into chunks of its own (the last may be short), or, for windows of at most half a chunk,
as many blocks as one chunk holds. A walk starts from nothing, so spans need no linking, and chunk n of a span meets
chunk n of the span before: with kernels/blocks.py's q~ and k~, o offset in the block and R_n the sum of k~_j v_j^T over
chunks n, n + 1, ... of the block before,

    o_t += sum over j of chunk n there, offset_j > offset_t, of (q~_t . k~_j) v_j + R_{n + 1}^T q~_t

carry_kernel walks from the end and leaves k~ and R; states and transitions come from triton_forward.py's scan, and
outputs from triton_spans_outputs.py. One program that held both states and made the outputs on the way was slower from
w = 2048 on, and its backward always (LOG.md). The carried state is kept transposed, [end, start], so that no product
takes another product's transpose.
"""

import triton
import triton.language as tl


@triton.jit
def beyond_edge(i, j, start, W, MANY: tl.constexpr):
    """True where query i reads key j of the block before its own; i and j broadcast, W - 1 tokens back at most."""
    if MANY:
        # counted from one window before the span, so that the division never meets a negative number
        own, other = (i - start + W) // W, (j - start + W) // W
        return (own == other + 1) & (i - j < W)
    else:
        return i - j < W


@triton.jit(do_not_specialize=["W"])
def carry_kernel(
    k, v, beta, since, rest, inverse, chunks, segments, carried, sums, cotangents,
    k_b, k_t, k_h, v_b, v_t, v_h, beta_b, beta_t, beta_h, s_b, s_t, p_b, p_t, p_h, H, W,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    TILES: tl.constexpr, SINGLE: tl.constexpr, CARRY: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span, one head, BR rows of the transition to the span's end, last chunk first.

    CARRY: writes carried (k~) and, unless SINGLE, sums (R). SAVE: writes cotangents, the transition after every chunk
    but the last, behind which it is I.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    h = (program // TILES) % H
    segment = program // TILES // H
    low = tl.load(segments + segment * 4)
    high = tl.load(segments + segment * 4 + 1)
    b = tl.load(chunks + low * 4).to(tl.int64)
    begin = tl.load(chunks + low * 4 + 1)
    end = tl.load(chunks + low * 4 + 3)
    row = tile * BR + tl.arange(0, BR)
    in_row = row < K
    key_at = tl.arange(0, BK)
    in_key = key_at < K
    column = tl.arange(0, BV)
    in_width = column < V
    dtype = k.dtype.element_ty
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    beta += b * beta_b + h * beta_h
    since += b * s_b + h
    rest += b * s_b + h
    if CARRY:
        carried += b * p_b + h * p_h
    place = tl.arange(0, C)
    back = tl.where((row[:, None] == key_at[None, :]) & in_row[:, None], 1.0, 0.0)
    total_sum = tl.zeros([BR, BV], tl.float32)
    first = begin + (high - low - 1) * C
    at = (high.to(tl.int64) - 1) * H + h
    for _ in range(low, high):
        t = first + place
        t64 = t.to(tl.int64)
        valid = t < end
        keys = tl.load(k + t64[:, None] * k_t + key_at[None, :], mask=valid[:, None] & in_key[None, :], other=0.0)
        after = tl.load(rest + t64 * s_t, mask=valid, other=0.0)
        rate = tl.load(beta + t64 * beta_t, mask=valid, other=0.0)
        if SAVE:
            to = cotangents + at * K * K + key_at[None, :] * K + row[:, None]
            tl.store(to, back.to(dtype), mask=in_row[:, None] & in_key[None, :] & (first + C < end))
        if SINGLE:
            # every block ends in the chunk: its tokens are carried from their own decays and keys on
            own = in_row[:, None] & valid[None, :]
            dx = tl.load(k + t64[None, :] * k_t + row[:, None], mask=own, other=0.0).to(tl.float32)
        else:
            dx = tl.dot(back.to(dtype), tl.trans(keys), input_precision=PRECISION)
        dx *= (rate * tl.exp(after))[None, :]
        solve = tl.load(inverse + at * C * C + place[:, None] * C + place[None, :])
        solved = tl.dot(dx.to(dtype), solve, input_precision=PRECISION)
        rows = solved.to(dtype)
        if CARRY:
            tl.store(carried + t64[None, :] * p_t + row[:, None], rows, mask=in_row[:, None] & valid[None, :])
        if CARRY and not SINGLE:
            in_values = valid[:, None] & in_width[None, :]
            values = tl.load(v + t64[:, None] * v_t + column[None, :], mask=in_values, other=0.0)
            total_sum += tl.dot(rows, values, input_precision=PRECISION)
            to = sums + at * K * V + row[:, None] * V + column[None, :]
            tl.store(to, total_sum.to(dtype), mask=in_row[:, None] & in_width[None, :])
        if not SINGLE:
            summed = tl.load(since + t64 * s_t, mask=valid, other=0.0)
            last = tl.minimum(first + C, end) - 1
            total = tl.exp(tl.load(since + last.to(tl.int64) * s_t))
            removed = (tl.exp(summed)[None, :] * solved).to(dtype)
            back = total * back - tl.dot(removed, keys, input_precision=PRECISION)
        first -= C
        at -= H


@triton.jit(do_not_specialize=["W", "SPAN"])
def span_sum_kernel(
    carried, v, sums, out, chunks, segments,
    p_b, p_t, p_h, v_b, v_t, v_h, H, W, SPAN,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of k~_j v_j^T over what the last token's window holds of the block before the last, float32, every span.

    Only a sequence's last span writes; out is [sequences, H, K, V].
    """
    program = tl.program_id(0).to(tl.int64)
    segment, h = program // H, program % H
    place_of_span = tl.load(segments + segment * 4 + 3)
    if (place_of_span & 2) == 0:
        low = tl.load(segments + segment * 4)
        high = tl.load(segments + segment * 4 + 1)
        sequence = tl.load(segments + segment * 4 + 2).to(tl.int64)
        has_before = (place_of_span & 1) != 0
        b = tl.load(chunks + low * 4).to(tl.int64)
        begin = tl.load(chunks + low * 4 + 1)
        end = tl.load(chunks + low * 4 + 3)
        key_at = tl.arange(0, BK)
        column = tl.arange(0, BV)
        in_key = key_at < K
        in_width = column < V
        carried += b * p_b + h * p_h
        v += b * v_b + h * v_h
        acc = tl.zeros([BK, BV], tl.float32)
        t = begin + (high - low - 1) * C + tl.arange(0, C)
        for here in tl.static_range(2 if MANY else 1):
            s = t - SPAN if here == 0 else t
            s64 = s.to(tl.int64)
            exists = (s < begin) & has_before if here == 0 else s < end
            used = exists & beyond_edge(end - 1, s, begin, W, MANY)
            rows = tl.load(
                carried + s64[None, :] * p_t + key_at[:, None], mask=in_key[:, None] & used[None, :], other=0.0
            )
            values = tl.load(
                v + s64[:, None] * v_t + column[None, :], mask=used[:, None] & in_width[None, :], other=0.0
            )
            acc += tl.dot(rows, values, input_precision=PRECISION)
        inside = in_key[:, None] & in_width[None, :]
        if not SINGLE:
            full = (SPAN + C - 1) // C
            behind = has_before & (high - low < full)
            at = (high.to(tl.int64) - full) * H + h
            at_sum = sums + at * K * V + key_at[:, None] * V + column[None, :]
            acc += tl.load(at_sum, mask=inside & behind, other=0.0).to(tl.float32)
        tl.store(out + (sequence * H + h) * K * V + key_at[:, None] * V + column[None, :], acc, mask=inside)
