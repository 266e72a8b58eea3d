"""short_conv's device code: programs walk along time, the last W - 1 inputs stay in registers.

    y_t = bias + sum over i of weight[:, i] * x_{t - W + 1 + i}        out_t = y_t or y_t * sigmoid(y_t)

    d y_t = d out_t * (1 or sigma(y_t) (1 + y_t (1 - sigma(y_t))))     y is computed again
    d x_{t - W + 1 + i} gets weight[:, i] * d y_t                      complete W - 1 tokens later, when it is stored
    d weight[:, i] = sum over t of d y_t * x_{t - W + 1 + i}           d bias = sum over t of d y_t

A tile is RUNS runs of `length` tokens each by C_TILE channels. All rows of a tile step through their runs together, so
every operand is read once and nothing passes between threads; at the edges of a run W - 1 rows are read twice. Loads
are wide because threads own neighbouring channels, and BATCH steps load before any of them computes or stores.
"""

# Tuples of rows grow where loops are unrolled, which a checker of types cannot follow.
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl

PLAIN = ["tokens", "sequences", "parts", "length"]  # a new value of these is no reason to compile again
FAR = tl.constexpr(2**30)  # stands for any distance in tokens that no run reaches


@triton.jit
def sigmoid(y):
    """1 / (1 + 2^(-y log2 e)) as the square of an inverse root.

    tl.sigmoid guards its exponential and its division against subnormal numbers, which cannot matter beside 1 but take
    as many instructions as four taps. This is one instruction each for 2^, 1 +, root and square; error 3e-7.
    """
    root = tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))
    return root * root


@triton.jit
def tile(tokens, parts, length, C, RUNS: tl.constexpr, C_TILE: tl.constexpr):
    """Channels of the program, its number over tokens, its batch row, and the first token of each run.

    Programs of the same tokens are neighbours: together they read whole rows of x.
    """
    c_tiles = tl.cdiv(C, C_TILE)
    channel = (tl.program_id(0) % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    part = tl.program_id(0) // c_tiles
    start = ((part % parts) * RUNS + tl.arange(0, RUNS)).to(tl.int64) * length
    return channel, part, (part // parts).to(tl.int64), start


@triton.jit
def bounds(cu_seqlens, at, row, sequences, tokens, PACKED: tl.constexpr, STEPS: tl.constexpr):
    """Sequence of each token, its first token and its end."""
    low = at * 0
    if PACKED:
        high = low + sequences
        for _ in tl.static_range(STEPS):  # bisection: the last sequence that starts at or before the token
            middle = (low + high) // 2
            starts = tl.load(cu_seqlens + middle, mask=middle < sequences, other=0).to(tl.int64)
            later = (starts > at) | (middle >= sequences)
            high = tl.where(later, middle, high)
            low = tl.where(later | (high - low <= 1), low, middle)
        first = tl.load(cu_seqlens + low).to(tl.int64)
        end = tl.load(cu_seqlens + low + 1).to(tl.int64)
    else:
        first = low
        end = low + tokens
        low += row
    return low, first, end


@triton.jit
def position(sequence, first, end, start, W: tl.constexpr):
    """What `entered` keeps per run: sequence, tokens of it before the next one, and its end counted from `start`."""
    age = tl.minimum(start - first, W).to(tl.int32) - 1
    return sequence.to(tl.int32), age, tl.minimum(end - start, FAR).to(tl.int32)


@triton.jit
def filters(weight, bias, channel, exists, W: tl.constexpr, W_TILE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Taps and bias as rows [1, C_TILE]; one load for all taps, since each load waits at a barrier to change layout."""
    number = tl.arange(0, W_TILE)[None, :]
    place = weight + channel[:, None] * W + number
    block = tl.load(place, mask=exists[:, None] & (number < W), other=0.0).to(tl.float32)
    base = tl.zeros_like(channel).to(tl.float32)
    if HAS_BIAS:
        base = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.sum(tl.where(number == i, block, 0.0), axis=1)[None, :],)
    return taps, base[None, :]


@triton.jit
def earlier(
    here, x_t, initial, start, sequence, first, tokens, channel, exists, C, W: tl.constexpr, HAS_INITIAL: tl.constexpr
):
    """The W - 1 inputs before the first token of every run: of its sequence, else of `initial`, else zeros."""
    window = ()
    for k in tl.static_range(W - 1):
        source = start + (k - (W - 1))
        real = (source >= first) & (start < tokens)
        row = tl.load(here + (k - (W - 1)) * x_t, mask=real[:, None] & exists[None, :], other=0.0).to(tl.float32)
        if HAS_INITIAL:
            early = (source < first) & (start < tokens)
            place = initial + ((sequence * (W - 1) + source - first + (W - 1)) * C)[:, None] + channel[None, :]
            row += tl.load(place, mask=early[:, None] & exists[None, :], other=0.0).to(tl.float32)
        window += (row,)
    return window


@triton.jit
def loaded(here, stride, step, until, exists, BATCH: tl.constexpr):
    """The next BATCH rows of every run, zeros from step `until` on."""
    rows = ()
    for u in tl.static_range(BATCH):
        rows += (tl.load(here + u * stride, mask=(step + u < until)[:, None] & exists[None, :], other=0.0),)
    return rows


@triton.jit
def entered(
    window, state, cu_seqlens, sequences, initial, start, step, channel, exists, C,
    W: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """The W - 1 inputs before token `step`, and its position; where a sequence begins, so does the window."""
    sequence, age, end = state
    new = (step == end) & (sequence + 1 < sequences)
    sequence += new.to(tl.int32)
    age = tl.where(new, 0, age + 1)
    following = tl.load(cu_seqlens + sequence + 1, mask=new, other=0).to(tl.int64)
    end = tl.where(new, tl.minimum(following - start, FAR).to(tl.int32), end)
    rows = ()
    for k in tl.static_range(W - 1):
        row = tl.zeros_like(window[k])
        if HAS_INITIAL:
            place = initial + ((sequence.to(tl.int64) * (W - 1) + k) * C)[:, None] + channel[None, :]
            row = tl.load(place, mask=new[:, None] & exists[None, :], other=0.0).to(tl.float32)
        rows += (tl.where(new[:, None], row, window[k]),)
    return rows, (sequence, age, end)


@triton.jit
def convolved(seen, taps, base, W: tl.constexpr):
    y = base
    for i in tl.static_range(W):
        y += taps[i] * seen[i]
    return y


@triton.jit
def extent(cu_seqlens, number, tokens, PACKED: tl.constexpr):
    """First token and end of sequence `number`, counted in its row of x."""
    first = number * 0
    end = first + tokens
    if PACKED:
        first = tl.load(cu_seqlens + number).to(tl.int64)
        end = tl.load(cu_seqlens + number + 1).to(tl.int64)
    return first, end


@triton.jit
def keep_tail(
    tail, x, initial, cu_seqlens, number, tokens, channel, exists, x_t, C, W: tl.constexpr, HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Copies the last W - 1 inputs of sequence `number`, reaching back into `initial`, or zeros, if it is shorter."""
    first, end = extent(cu_seqlens, number, tokens, PACKED)
    for j in range(W - 1):
        source = end - (W - 1) + j
        kept = tl.load(x + source * x_t + channel, mask=exists & (source >= first), other=0.0)
        if HAS_INITIAL:
            place = initial + (number * (W - 1) + source - first + (W - 1)) * C + channel
            kept = tl.where(source >= first, kept, tl.load(place, mask=exists & (source < first), other=0.0))
        tl.store(tail + (number * (W - 1) + j) * C + channel, kept, mask=exists)


@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    x, weight, bias, initial, cu_seqlens, out, tail, x_b, x_t, tokens, sequences, parts, length, C,
    W: tl.constexpr, W_TILE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, STEPS: tl.constexpr, RUNS: tl.constexpr, C_TILE: tl.constexpr, BATCH: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel, part, row, start = tile(tokens, parts, length, C, RUNS, C_TILE)
    exists = channel < C
    left = tl.minimum(tokens - start, length).to(tl.int32)
    x_t, stride = tl.cast(x_t, tl.int64), tl.cast(C, tl.int64)
    x += row * x_b
    here = x + start[:, None] * x_t + channel[None, :]
    there = out + (row * tokens + start)[:, None] * stride + channel[None, :]
    sequence, first, end = bounds(cu_seqlens, start, row, sequences, tokens, PACKED, STEPS)
    state = position(sequence, first, end, start, W)
    window = earlier(here, x_t, initial, start, sequence, first, tokens, channel, exists, stride, W, HAS_INITIAL)
    if AHEAD:
        new = loaded(here, x_t, 0, left, exists, BATCH)
    taps, base = filters(weight, bias, channel, exists, W, W_TILE, HAS_BIAS)
    for step in tl.range(0, length, BATCH, num_stages=STAGES):
        if AHEAD:
            following = loaded(here + BATCH * x_t, x_t, step + BATCH, left, exists, BATCH)
        else:
            new = loaded(here, x_t, step, left, exists, BATCH)
        for u in tl.static_range(BATCH):
            if PACKED:
                window, state = entered(
                    window, state, cu_seqlens, sequences, initial, start, step + u, channel, exists, stride, W,
                    HAS_INITIAL,
                )  # fmt: skip
            seen = window + (new[u].to(tl.float32),)
            y = convolved(seen, taps, base, W)
            if SILU:
                y *= sigmoid(y)
            tl.store(there + u * stride, y.to(out.dtype.element_ty), mask=(step + u < left)[:, None] & exists[None, :])
            window = seen[1:]
        here += BATCH * x_t
        there += BATCH * stride
        if AHEAD:
            new = following
    # Without packing there is one sequence per row; its first program keeps the tail.
    for n in range(part % parts, sequences if PACKED else 1, parts):
        keep_tail(
            tail, x, initial, cu_seqlens, row * 0 + n if PACKED else row, tokens, channel, exists, x_t, stride, W,
            HAS_INITIAL, PACKED,
        )  # fmt: skip


@triton.jit
def d_convolved(d_out, seen, taps, base, W: tl.constexpr, SILU: tl.constexpr):
    d_y = d_out.to(tl.float32)
    if SILU:
        y = convolved(seen, taps, base, W)
        gate = sigmoid(y)
        d_y *= gate + y * gate * (1.0 - gate)
    return d_y


@triton.jit
def scattered(d_y, taps, pending, age, W: tl.constexpr, PACKED: tl.constexpr):
    """d x of the oldest token that d_y reaches, now complete, and what the W - 1 tokens after it have so far."""
    gathered = ()
    for i in tl.static_range(W):
        share = taps[i] * d_y
        if PACKED and i < W - 1:
            share = tl.where((age >= W - 1 - i)[:, None], share, 0.0)  # older tokens belong to another sequence
        gathered += (pending[i] + share if i < W - 1 else share,)
    return gathered[0], gathered[1:]


@triton.jit
def back_through(
    new, d_new, there, carried, taps, base, cu_seqlens, sequences, initial, start, step, least, left, channel, exists,
    C, W: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, D_X: tl.constexpr,
    SUMS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """BATCH steps of the backward pass; stores d x of the tokens W - 1 before them, if they lie in [least, left)."""
    window, pending, sums, state = carried
    for u in tl.static_range(BATCH):
        if PACKED:
            window, state = entered(
                window, state, cu_seqlens, sequences, initial, start, step + u, channel, exists, C, W, HAS_INITIAL
            )
        seen = window + (new[u].to(tl.float32),)
        d_y = d_convolved(d_new[u], seen, taps, base, W, SILU)
        if D_X:
            d_x, pending = scattered(d_y, taps, pending, state[1], W, PACKED)
            at = step + u - (W - 1)
            own = (at >= least) & (at < left)
            place = there + (u - (W - 1)) * C
            tl.store(place, d_x.to(there.dtype.element_ty), mask=own[:, None] & exists[None, :])
        if SUMS:
            further = ()
            for i in tl.static_range(W):
                further += (sums[i] + d_y * seen[i],)
            sums = further + (sums[W] + d_y,)
        window = seen[1:]
    return window, pending, sums, state


@triton.jit(do_not_specialize=PLAIN)
def backward_kernel(
    x, weight, bias, initial, cu_seqlens, d_out, d_x, d_taps, x_b, x_t, d_b, d_t, tokens, sequences, parts, length, C,
    W: tl.constexpr, W_TILE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, STEPS: tl.constexpr, D_X: tl.constexpr, SUMS: tl.constexpr, RUNS: tl.constexpr,
    C_TILE: tl.constexpr, BATCH: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d x, and each program's part of d weight and d bias: d_taps [programs over tokens, W + 1, C]."""
    channel, part, row, start = tile(tokens, parts, length, C, RUNS, C_TILE)
    exists = channel < C
    left = tl.minimum(tokens - start, length).to(tl.int32)
    until = tl.minimum(tokens - start, length + (W - 1)).to(tl.int32)
    x_t, d_t, stride = tl.cast(x_t, tl.int64), tl.cast(d_t, tl.int64), tl.cast(C, tl.int64)
    x_start = x + row * x_b + start[:, None] * x_t + channel[None, :]
    d_start = d_out + row * d_b + start[:, None] * d_t + channel[None, :]
    d_x_start = d_x + (row * tokens + start)[:, None] * stride + channel[None, :]
    here, d_here, there = x_start, d_start, d_x_start
    sequence, first, end = bounds(cu_seqlens, start, row, sequences, tokens, PACKED, STEPS)
    state = position(sequence, first, end, start, W)
    window = earlier(here, x_t, initial, start, sequence, first, tokens, channel, exists, stride, W, HAS_INITIAL)
    if AHEAD:
        new = loaded(here, x_t, 0, until, exists, BATCH)
        d_new = loaded(d_here, d_t, 0, until, exists, BATCH)
    taps, base = filters(weight, bias, channel, exists, W, W_TILE, HAS_BIAS)
    zeros = tl.zeros([RUNS, C_TILE], tl.float32)
    pending = ()
    for _ in tl.static_range(W - 1):
        pending += (zeros,)
    carried = window, pending, (zeros,) + pending + (zeros,), state
    for step in tl.range(0, length, BATCH, num_stages=STAGES):
        if AHEAD:
            following = loaded(here + BATCH * x_t, x_t, step + BATCH, until, exists, BATCH)
            d_following = loaded(d_here + BATCH * d_t, d_t, step + BATCH, until, exists, BATCH)
        else:
            new = loaded(here, x_t, step, until, exists, BATCH)
            d_new = loaded(d_here, d_t, step, until, exists, BATCH)
        carried = back_through(
            new, d_new, there, carried, taps, base, cu_seqlens, sequences, initial, start, step, 0, left, channel,
            exists, stride, W, HAS_INITIAL, SILU, PACKED, D_X, SUMS, BATCH,
        )  # fmt: skip
        here += BATCH * x_t
        d_here += BATCH * d_t
        there += BATCH * stride
        if AHEAD:
            new = following
            d_new = d_following

    if D_X:  # d y of the next run's first W - 1 tokens, for the last tokens of this one
        for step in tl.range(length, length + (W - 1), BATCH, num_stages=1):
            new = loaded(x_start + step * x_t, x_t, step, until, exists, BATCH)
            d_new = loaded(d_start + step * d_t, d_t, step, until, exists, BATCH)
            carried = back_through(
                new, d_new, d_x_start + step * stride, carried, taps, base, cu_seqlens, sequences, initial, start,
                step, 0, left, channel, exists, stride, W, HAS_INITIAL, SILU, PACKED, True, False, BATCH,
            )  # fmt: skip
    if SUMS:
        for i in tl.static_range(W + 1):
            place = d_taps + (part.to(tl.int64) * (W + 1) + i) * stride + channel
            tl.store(place, tl.sum(carried[2][i], axis=0), mask=exists)


@triton.jit(do_not_specialize=["parts"])
def sum_kernel(
    d_taps, d_weight, d_bias, parts, C, W: tl.constexpr, HAS_BIAS: tl.constexpr, P_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):  # fmt: skip
    """Sums of d_taps [parts, W + 1, C] over parts, always in the same order: one tap, or the bias, per program."""
    c_tiles = tl.cdiv(C, C_TILE)
    channel = (tl.program_id(0) % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    tap = tl.program_id(0) // c_tiles
    exists = channel < C
    part = tl.arange(0, P_TILE)
    here = d_taps + (part.to(tl.int64)[:, None] * (W + 1) + tap) * C + channel[None, :]
    sums = tl.zeros([P_TILE, C_TILE], tl.float32)
    for done in range(0, parts, P_TILE):
        sums += tl.load(here, mask=(done + part < parts)[:, None] & exists[None, :], other=0.0)
        here += tl.cast(C, tl.int64) * (P_TILE * (W + 1))
    total = tl.sum(sums, axis=0)
    tl.store(d_weight + channel * W + tap, total.to(d_weight.dtype.element_ty), mask=exists & (tap < W))
    if HAS_BIAS:
        tl.store(d_bias + channel, total.to(d_bias.dtype.element_ty), mask=exists & (tap == W))


@triton.jit(do_not_specialize=PLAIN)
def initial_kernel(
    x, weight, bias, initial, cu_seqlens, d_out, d_initial, x_b, x_t, d_b, d_t, tokens, sequences, C,
    W: tl.constexpr, W_TILE: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    RUNS: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    """d initial [sequences, W - 1, C]: RUNS sequences walk W - 1 steps, which complete the tokens before them."""
    c_tiles = tl.cdiv(C, C_TILE)
    channel = (tl.program_id(0) % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    exists = channel < C
    number = (tl.program_id(0) // c_tiles).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    real = number < sequences
    x_t, d_t, stride = tl.cast(x_t, tl.int64), tl.cast(d_t, tl.int64), tl.cast(C, tl.int64)
    first = number * 0
    until = first + tokens
    if PACKED:
        first = tl.load(cu_seqlens + number, mask=real, other=0).to(tl.int64)
        until = tl.load(cu_seqlens + number + 1, mask=real, other=0).to(tl.int64) - first
    until = tl.where(real, tl.minimum(until, W - 1), 0).to(tl.int32)
    row = number * 0 if PACKED else number
    here = x + (row * x_b + first * x_t)[:, None] + channel[None, :]
    d_here = d_out + (row * d_b + first * d_t)[:, None] + channel[None, :]
    there = d_initial + ((number + 1) * (W - 1) * stride)[:, None] + channel[None, :]
    last = tl.where(real, 0, -W)  # d x of tokens -(W - 1) .. -1 is wanted, of sequences that exist
    taps, base = filters(weight, bias, channel, exists, W, W_TILE, HAS_BIAS)
    state = position(number, first, first, first, W)
    limit = tl.where(real, first + 1, first)
    window = earlier(here, x_t, initial, first, number, first, limit, channel, exists, stride, W, True)
    pending = ()
    for _ in tl.static_range(W - 1):
        pending += (tl.zeros([RUNS, C_TILE], tl.float32),)
    carried = window, pending, (), state
    for step in range(W - 1):
        new = loaded(here, x_t, step, until, exists, 1)
        d_new = loaded(d_here, d_t, step, until, exists, 1)
        carried = back_through(
            new, d_new, there, carried, taps, base, cu_seqlens, sequences, initial, first, step, -W, last, channel,
            exists, stride, W, False, SILU, False, True, False, 1,
        )  # fmt: skip
        here += x_t
        d_here += d_t
        there += stride


@triton.jit(do_not_specialize=PLAIN)
def tail_kernel(
    cu_seqlens, d_tail, d_x, d_initial, tokens, C, W: tl.constexpr, PACKED: tl.constexpr, D_X: tl.constexpr,
    D_INITIAL: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    """Adds d tail [sequences, W - 1, C] to d x, or to d initial where the sequence was shorter than the tail."""
    c_tiles = tl.cdiv(C, C_TILE)
    channel = (tl.program_id(0) % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    exists = channel < C
    number = (tl.program_id(0) // c_tiles).to(tl.int64)
    stride = tl.cast(C, tl.int64)
    first, end = extent(cu_seqlens, number, tokens, PACKED)
    row = number * 0 if PACKED else number
    for j in range(W - 1):
        source = end - (W - 1) + j
        share = tl.load(d_tail + (number * (W - 1) + j) * stride + channel, mask=exists, other=0.0).to(tl.float32)
        if D_X:
            place = d_x + (row * tokens + source) * stride + channel
            kept = exists & (source >= first)
            total = tl.load(place, mask=kept, other=0.0).to(tl.float32) + share
            tl.store(place, total.to(d_x.dtype.element_ty), mask=kept)
        if D_INITIAL:
            place = d_initial + (number * (W - 1) + source - first + (W - 1)) * stride + channel
            early = exists & (source < first)
            total = tl.load(place, mask=early, other=0.0).to(tl.float32) + share
            tl.store(place, total.to(d_initial.dtype.element_ty), mask=early)
