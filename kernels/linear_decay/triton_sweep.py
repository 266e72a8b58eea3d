"""Chunked sweeps of scalar-decay linear attention: one kernel makes outputs and the gradients of query, key and value.

Time is cut into blocks (one window each; without a window a block is the whole sequence), blocks into chunks of at most
C tokens, and runs of chunks into segments, one program each. With c_i the cumulative log decay inside a chunk (token i
included) and r_i the log decay of what follows token i in its chunk, a sweep over *written* tokens (x, y) keeps

    S' = exp(c_C) S + sum over j of b_j x_j y_j^T

and answers *reading* tokens u of the same places

    out_i = a_i u_i S + sum over j of D_ij (u_i . x_j) y_j

    forwards in time    a_i = scale exp(c_i)   b_j = exp(r_j)          D_ij = scale exp(c_i - c_j), j <= i
    backwards in time   a_j = exp(r_j)         b_i = scale exp(c_i)    D_ji = scale exp(c_i - c_j), i >= j

                    x       y       u
    out             key     value   query     forwards
    d query         value   key     d out     forwards (S transposed)
    d value         query   d out   key       backwards (S is then the cotangent of the state)
    d key           d out   query   value     backwards (the same transposed)

so every factor is exp of a sum of decays, <= 1 (Lightning Attention, Qin et al. 2024; the chunked form of Mamba-2, Dao
and Gu 2024). Segments start from states made by `segment_states` and `scan_segments`.

Window of w tokens (blocks of w): a reading token i of block n also sees the tokens j > i of the block before it
(j < i of the block behind it, when backwards), for which U = sum of b_j x_j y_j^T with decays to the block's edge is
summed against the direction of the sweep; the scheme of kernels/blocks.py. It needs no subtraction, whatever w is.

Decay. With P_ij = scale exp(c_i - c_j) (q_i . k_j) (d out_i . v_j), the gradient collects the pairs that decay over l:

    d g_l = sum over j < l <= i of P_ij

(d/d g_l of every pair is the pair itself if j < l <= i, else 0) and no difference of long sums is needed. With
e_i = q_i . (d query_i without what comes from token i itself), all pairs that end in i, and f_j = k_j . (d key_j
likewise), all that start in j, each apart into pairs inside the chunk and pairs with other chunks,

    d g_l = sum over i >= l of (e_i - f_i inside) + sum over j < l of (f_j with others) + exp(c_C) <S, dS>

over l's chunk, S the state before it and dS the cotangent of the state after it: only pairs of one chunk behind l are
taken away again, and both sweeps form them from the same rounded numbers (in float32 one sweep forms them all).
Initial and final state count as tokens before and behind all others through S and dS. With a window, pairs with the
block before (after) are e (f) of a part of their own and are collected alike, over the whole block.

Every product is formed in the orientation in which it is used: some compilers for Hopper are wrong when the transposed
result of one tl.dot is an operand of another. Transposed loads are safe.
"""

import triton
import triton.language as tl


@triton.jit
def place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE: tl.constexpr):
    """Sequence and batch row of a segment, its index in the sequence, the sequence's first token and end.

    Packed (N_TILE > 0): one row; segment_ends are running sums of the sequences' numbers of segments, and programs
    behind the last segment get sequence = sequences.
    """
    if N_TILE > 0:
        n = tl.arange(0, N_TILE)
        ends = tl.load(segment_ends + n, mask=n < sequences, other=2147483647)
        sequence = tl.sum((ends <= segment).to(tl.int32), axis=0)
        index = segment - tl.max(tl.where(ends <= segment, ends, 0), axis=0)
        low = tl.load(cu_seqlens + sequence, mask=sequence < sequences, other=0).to(tl.int64)
        high = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=0).to(tl.int64)
        row = low * 0
    else:
        sequence = segment // per_sequence
        index = segment % per_sequence
        row = sequence.to(tl.int64)
        low = row * 0
        high = low + tokens
    return sequence, row, index, low, high


@triton.jit
def cut(index, low, high, window, per_block, WINDOW: tl.constexpr):
    """Block of a segment, the segment's index in it, the block's first token and end."""
    if WINDOW:
        block = index // per_block
        inner = index % per_block
        start = low + block.to(tl.int64) * window
        stop = tl.minimum(start + window, high)
    else:
        block = index * 0
        inner = index
        start = low
        stop = high
    return block, inner, start, stop


@triton.jit
def steady_decays(rate, count, C: tl.constexpr):
    """Log decay, the same at every token, of a chunk of `count` tokens; returns as decays."""
    i = tl.arange(0, C)
    held = tl.maximum(tl.minimum(count, C), 0).to(tl.int32)
    return (i + 1).to(tl.float32) * rate, tl.maximum(held - 1 - i, 0).to(tl.float32) * rate, held.to(tl.float32) * rate


@triton.jit
def decays(gates, stride, rate, start, stop, C: tl.constexpr, PER_TOKEN: tl.constexpr, EXACT: tl.constexpr):
    """Log decay of a chunk: up to each token (itself included), after each token, and in all."""
    i = tl.arange(0, C)
    if PER_TOKEN:
        count = tl.maximum(tl.minimum(stop - start, C), 0).to(tl.int32)
        gates += start * stride
        since = tl.cumsum(tl.load(gates + i * stride, mask=i < count, other=0.0).to(tl.float32), axis=0)
        total = tl.sum(tl.where(i == C - 1, since, 0.0), axis=0)
        if EXACT:  # summed from the end: a difference would carry the rounding of the longer sum
            later = tl.load(gates + (i + 1) * stride, mask=i + 1 < count, other=0.0).to(tl.float32)
            rest = tl.cumsum(later, axis=0, reverse=True)
        else:
            rest = tl.minimum(total - since, 0.0)
    else:
        since, rest, total = steady_decays(rate, stop - start, C)
    return since, rest, total


@triton.jit
def summed_decays(sums, rate, at, count, C: tl.constexpr, PER_TOKEN: tl.constexpr):
    """As decays, under a window: per token from row `at` of what chunk_decays made, [chunks, H, 2, C]."""
    i = tl.arange(0, C)
    if PER_TOKEN:
        sums += at * (2 * C)
        since = tl.load(sums + i)
        rest = tl.load(sums + (C + i))
        total = tl.load(sums + (C - 1))
    else:
        since, rest, total = steady_decays(rate, count, C)
    return since, rest, total


@triton.jit
def pair_decays(since, rate, place_, PER_TOKEN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[C, C] exp(c_i - c_j) for j <= i, else 0, with i along the rows (along the columns if TRANSPOSED).

    Masked before exp: the other half would overflow. place_ counts from a start that changes from chunk to chunk, so
    that the mask is compared anew instead of being kept in a register per element.
    """
    if TRANSPOSED:
        i, j = place_[None, :], place_[:, None]
        between = since[None, :] - since[:, None]
    else:
        i, j = place_[:, None], place_[None, :]
        between = since[:, None] - since[None, :]
    if not PER_TOKEN:
        between = (i - j).to(tl.float32) * rate
    return tl.exp(tl.where(i >= j, between, float("-inf")))


@triton.jit
def rows(base, stride, start, stop, d0, D, C: tl.constexpr, D_TILE: tl.constexpr):
    """[C, D_TILE] tile of tokens start .. stop - 1 and columns d0 .. D - 1, zeros elsewhere."""
    i = tl.arange(0, C)
    d = d0 + tl.arange(0, D_TILE)
    inside = (i < stop - start)[:, None] & (d < D)[None, :]
    return tl.load(base + start * stride + (i[:, None] * stride + d[None, :]), mask=inside, other=0.0)


@triton.jit
def state_tile(base, x0, y0, X, Y, x_stride, y_stride, X_TILE: tl.constexpr, Y_TILE: tl.constexpr):
    """Pointers to and mask of one tile of an [X, Y] state."""
    x = x0 + tl.arange(0, X_TILE)
    y = y0 + tl.arange(0, Y_TILE)
    return base + (x[:, None] * x_stride + y[None, :] * y_stride), (x < X)[:, None] & (y < Y)[None, :]


# Numbers that change with the input: no compilation of their own for 1 and for multiples of 16.
PLAIN = ["tokens", "sequences", "per_sequence", "window", "per_block", "chunk", "chunks", "scale"]


@triton.jit
def chunk_place(
    cu_seqlens, segment_ends, tokens, sequences, per_sequence, window, per_block, chunk, chunks, H,
    H_TILE: tl.constexpr, N_TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of a program for one chunk of H_TILE heads: heads, whether it has work, its chunk's index in all and in its
    block, its batch row, its first token and how many it has."""
    h_tiles = tl.cdiv(H, H_TILE)
    head = (tl.program_id(0) % h_tiles) * H_TILE + tl.arange(0, H_TILE)
    chunk_at = (tl.program_id(0) // h_tiles).to(tl.int64)
    segment = tl.program_id(0) // (h_tiles * chunks)
    sequence, row, index, low, high = place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE)
    _block, inner, start, stop = cut(index, low, high, window, per_block, WINDOW)
    in_block = inner * chunks + tl.program_id(0) // h_tiles % chunks
    begin = start + in_block * chunk
    return head, sequence < sequences, chunk_at, in_block, row, begin, tl.minimum(chunk, stop - begin)


@triton.jit(do_not_specialize=PLAIN)
def chunk_decays(
    gates, sums, cu_seqlens, segment_ends, gates_b, gates_t, gates_h,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, H,
    C: tl.constexpr, H_TILE: tl.constexpr, N_TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """[chunks, H, 2, C] log decay up to each token of a chunk, itself included, and after it; a chunk that ends short
    goes on with decays of 0. Both are sums of their own: a difference would carry the rounding of the longer one."""
    head, works, chunk_at, _, row, begin, count = chunk_place(
        cu_seqlens, segment_ends, tokens, sequences, per_sequence, window, per_block, chunk, chunks, H, H_TILE, N_TILE,
        WINDOW,
    )  # fmt: skip
    if works:
        n = tl.arange(0, C)
        real = (head < H)[None, :]
        at = gates + row * gates_b + (begin + n)[:, None] * gates_t + head.to(tl.int64)[None, :] * gates_h
        decay = tl.load(at, mask=(n < count)[:, None] & real, other=0.0).to(tl.float32)
        later = tl.load(at + gates_t, mask=(n + 1 < count)[:, None] & real, other=0.0).to(tl.float32)
        to = sums + ((chunk_at * H + head) * (2 * C))[None, :] + n[:, None]
        tl.store(to, tl.cumsum(decay, axis=0), mask=real)
        tl.store(to + C, tl.cumsum(later, axis=0, reverse=True), mask=real)


@triton.jit(do_not_specialize=PLAIN)
def segment_states(
    left, right, gates, local, totals, cu_seqlens, segment_ends,
    left_b, left_t, left_h, right_b, right_t, right_h, gates_b, gates_t, gates_h,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale, H, K, V,
    C: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, N_TILE: tl.constexpr, WINDOW: tl.constexpr,
    REVERSE: tl.constexpr, PER_TOKEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the state at its end (its start if REVERSE), and its log decay."""
    k_tiles, v_tiles = tl.cdiv(K, K_TILE), tl.cdiv(V, V_TILE)
    tile = tl.program_id(0) % (k_tiles * v_tiles)
    head = (tl.program_id(0) // (k_tiles * v_tiles)) % H
    segment = tl.program_id(0) // (k_tiles * v_tiles * H)
    k0, v0 = (tile // v_tiles) * K_TILE, (tile % v_tiles) * V_TILE
    sequence, row, index, low, high = place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE)
    if sequence >= sequences:
        return
    _block, inner, start, stop = cut(index, low, high, window, per_block, WINDOW)
    left += row * left_b + head.to(tl.int64) * left_h
    right += row * right_b + head.to(tl.int64) * right_h
    gates += row * gates_b + head.to(tl.int64) * gates_h
    rate = 0.0 if PER_TOKEN else tl.load(gates).to(tl.float32)
    first = inner * chunks
    count = tl.minimum(chunks, tl.cdiv(stop - start, chunk).to(tl.int32) - first)
    state = tl.zeros([K_TILE, V_TILE], tl.float32)
    passed = 0.0
    for step in range(0, count):
        m = count - 1 - step if REVERSE else step
        begin = start + (first + m) * chunk
        end = tl.minimum(begin + chunk, stop)
        if WINDOW:
            chunk_at = (segment.to(tl.int64) * chunks + m) * H + head
            since, rest, total = summed_decays(gates, rate, chunk_at, end - begin, C, PER_TOKEN)
        else:
            since, rest, total = decays(gates, gates_t, rate, begin, end, C, PER_TOKEN, PRECISION == "ieee")
        x = rows(left, left_t, begin, end, k0, K, C, K_TILE)
        y = rows(right, right_t, begin, end, v0, V, C, V_TILE)
        weight = tl.exp(since) * scale if REVERSE else tl.exp(rest)
        y = (y * weight[:, None]).to(y.dtype)
        state = tl.dot(tl.trans(x), y, acc=state * tl.exp(total), input_precision=PRECISION)
        passed += total
    at = segment.to(tl.int64) * H + head
    pointers, mask = state_tile(local + at * K * V, k0, v0, K, V, V, 1, K_TILE, V_TILE)
    tl.store(pointers, state, mask=mask)
    if tile == 0:
        tl.store(totals + at, passed)


@triton.jit(do_not_specialize=["per_group"])
def scan_segments(
    local, totals, initial, starts, final, segment_ends, per_group, H, E,
    GROUP: tl.constexpr, E_TILE: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """States at segment starts from what the segments add, in one sequence; E = K * V numbers a state."""
    e_tiles = tl.cdiv(E, E_TILE)
    tile = tl.program_id(0) % e_tiles
    head = (tl.program_id(0) // e_tiles) % H
    group = tl.program_id(0) // (e_tiles * H)
    if PACKED:
        first = tl.load(segment_ends + group - 1, mask=group > 0, other=0)
        count = tl.load(segment_ends + group) - first
    else:
        first = group * per_group
        count = per_group
    e = tile * E_TILE + tl.arange(0, E_TILE)
    inside = (e < E)[None, :]
    n = tl.arange(0, GROUP)
    if HAS_INITIAL:
        carry = tl.load(initial + (group.to(tl.int64) * H + head) * E + e, mask=e < E, other=0.0)
    else:
        carry = tl.zeros([E_TILE], tl.float32)
    edge = first + (count - 1 if REVERSE else 0)
    tl.store(starts + (edge.to(tl.int64) * H + head) * E + e, carry, mask=e < E)
    for base in range(0, count, GROUP):
        place_ = base + n
        segment = (first + (count - 1 - place_ if REVERSE else place_)).to(tl.int64)
        valid = place_ < count
        total = tl.load(totals + segment * H + head, mask=valid, other=0.0)
        x = tl.load(local + ((segment * H + head) * E)[:, None] + e[None, :], mask=valid[:, None] & inside, other=0.0)
        # weights[s, r]: decay from the end of segment r to the end of segment s, as a product of factors <= 1
        decay = tl.exp(total)[:, None]
        weights = tl.cumprod(tl.where(n[:, None] > n[None, :], decay, 1.0), axis=0)
        x = tl.dot(tl.where(n[:, None] >= n[None, :], weights, 0.0), x, input_precision="ieee")
        x += tl.cumprod(tl.exp(total), axis=0)[:, None] * carry[None, :]
        following = segment - 1 if REVERSE else segment + 1
        tl.store(
            starts + ((following * H + head) * E)[:, None] + e[None, :], x, mask=(place_ + 1 < count)[:, None] & inside
        )
        carry = tl.sum(tl.where(n[:, None] == GROUP - 1, x, 0.0), axis=0)
    tl.store(final + (group.to(tl.int64) * H + head) * E + e, carry, mask=e < E)


@triton.jit(do_not_specialize=["count"])
def scan_block(
    local, totals, starts, beyond, near_offset, far_offset, count, H, E, E_TILE: tl.constexpr, REVERSE: tl.constexpr
):
    """In one window block of `count` segments, from what they add: the states at their starts and what the segments
    behind each add up to at the block's edge; the log decays from the block's start to each (near_offset) and behind it
    (far_offset); all in the direction of the sweep. One after the other: a block has few."""
    e_tiles = tl.cdiv(E, E_TILE)
    tile = tl.program_id(0) % e_tiles
    head = (tl.program_id(0) // e_tiles) % H
    first = (tl.program_id(0) // (e_tiles * H)).to(tl.int64) * count
    e = tile * E_TILE + tl.arange(0, E_TILE)
    state = tl.zeros([E_TILE], tl.float32)
    near = 0.0
    for i in range(0, count):
        at = (first + (count - 1 - i if REVERSE else i)) * H + head
        total = tl.load(totals + at)
        x = tl.load(local + at * E + e, mask=e < E, other=0.0)
        tl.store(starts + at * E + e, state, mask=e < E)
        if tile == 0:
            tl.store(near_offset + at, near)
        state = state * tl.exp(total) + x
        near += total
    behind = tl.zeros([E_TILE], tl.float32)
    far = 0.0
    for i in range(0, count):
        at = (first + (i if REVERSE else count - 1 - i)) * H + head
        total = tl.load(totals + at)
        x = tl.load(local + at * E + e, mask=e < E, other=0.0)
        tl.store(beyond + at * E + e, behind, mask=e < E)
        if tile == 0:
            tl.store(far_offset + at, far)
        behind += x * tl.exp(far)
        far += total


@triton.jit
def answer(
    x, y, u, r, state, reading, weights, scale, place_, OWN: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, Y] for reading tokens u from a state and from written tokens x, y; weights: reading tokens along the rows.

    For the decay's gradient also r times what each reading token has from the state (far), and the same of all other
    tokens, those of the tile too. OWN: the tokens are the same, and what one has from itself is in neither. In float32
    the tile's pairs are formed once, by the sweep forwards, which then takes away those that begin in each token: sums
    made twice would differ by their rounding, and under strong decay little else is left.
    """
    far = tl.zeros([u.shape[0]], tl.float32)
    others = tl.zeros([u.shape[0]], tl.float32)
    EXACT: tl.constexpr = PRECISION == "ieee"
    scores = tl.dot(u, tl.trans(x), input_precision=PRECISION) * weights
    out = tl.dot(u, state.to(x.dtype), input_precision=PRECISION) * reading[:, None]
    if GATE:
        far = tl.sum(out * r.to(tl.float32), axis=1)
        if EXACT:
            others = far
            if not (REVERSE and OWN):
                pairs = tl.dot(r, tl.trans(y), input_precision=PRECISION) * scores
                if OWN:
                    pairs = tl.where(place_[:, None] == place_[None, :], 0.0, pairs)
                    others -= tl.sum(pairs, axis=0)
                others += tl.sum(pairs, axis=1)
        elif OWN:
            scores = tl.where(place_[:, None] == place_[None, :], 0.0, scores)
    out = tl.dot(scores.to(x.dtype), y, acc=out, input_precision=PRECISION)
    if GATE and not EXACT:
        others = tl.sum(out * r.to(tl.float32), axis=1)
        if OWN:
            own = tl.sum(u.to(tl.float32) * x.to(tl.float32), axis=1) * scale
            out += own[:, None] * y.to(tl.float32)
    return out, far, others


@triton.jit
def neighbour_pass(
    x, y, u, r, out, gates, rate, far_gate, beyond, near_offset, far_offset, x_t, y_t, u_t, r_t,
    x_state, y_state, segment, head, first, start, stop, high, window, per_block, chunk, chunks, scale, x0, y0, H, X, Y,
    C: tl.constexpr, X_TILE: tl.constexpr, Y_TILE: tl.constexpr, L_TILE: tl.constexpr, REVERSE: tl.constexpr,
    PER_TOKEN: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes what a segment's tokens see in the neighbouring block, summed against the direction of the sweep."""
    n = tl.arange(0, C)
    column = y0 + tl.arange(0, Y_TILE)
    other = segment + per_block if REVERSE else segment - per_block
    shift = window if REVERSE else -window
    other_stop = tl.minimum(start + shift + window, high)
    summed = tl.zeros([X_TILE, Y_TILE], tl.float32)
    written_offset = 0.0
    reading_base = 0.0
    if per_block > 1:
        there = other.to(tl.int64) * H + head
        beyond_at, inside = state_tile(beyond + there * X * Y, x0, y0, X, Y, x_state, y_state, X_TILE, Y_TILE)
        summed = tl.load(beyond_at, mask=inside, other=0.0)
        written_offset = tl.load(far_offset + there)
        reading_base = tl.load(near_offset + segment.to(tl.int64) * H + head)
    count = tl.minimum(chunks, tl.cdiv(window, chunk) - first)
    chunk_index = tl.arange(0, L_TILE)
    chunk_totals = tl.zeros([L_TILE], tl.float32)
    row_here = segment.to(tl.int64) * chunks * H + head
    row_there = other.to(tl.int64) * chunks * H + head
    if PER_TOKEN:
        ends_at = (row_here + chunk_index * H) * (2 * C) + (C - 1)
        chunk_totals = tl.load(gates + ends_at, mask=chunk_index < count, other=0.0)
    for step in range(0, count):
        m = step if REVERSE else count - 1 - step
        begin = start + (first + m) * chunk
        end = tl.minimum(begin + chunk, stop)
        there_begin = begin + shift
        there_end = tl.minimum(there_begin + chunk, other_stop)
        since, rest, _ = summed_decays(gates, rate, row_here + m * H, end - begin, C, PER_TOKEN)
        since_there, rest_there, total = summed_decays(
            gates, rate, row_there + m * H, there_end - there_begin, C, PER_TOKEN
        )
        if PER_TOKEN:
            passed = chunk_index > m if REVERSE else chunk_index < m
            reading_offset = reading_base + tl.sum(tl.where(passed, chunk_totals, 0.0), axis=0)
        else:
            before = ((first + m) * chunk).to(tl.float32) * rate
            after = tl.maximum(window - (first + m + 1) * chunk, 0).to(tl.float32) * rate
            reading_offset = after if REVERSE else before
            written_offset = before if REVERSE else after
        place_ = m * chunk + n
        if REVERSE:
            reading = tl.exp(reading_offset + rest)
            writing = tl.exp(written_offset + since_there) * scale
            seen = place_[:, None] > place_[None, :]
        else:
            reading = tl.exp(reading_offset + since) * scale
            writing = tl.exp(written_offset + rest_there)
            seen = place_[:, None] < place_[None, :]
        written_offset += total
        x_tile = rows(x, x_t, there_begin, there_end, x0, X, C, X_TILE)
        y_tile = rows(y, y_t, there_begin, there_end, y0, Y, C, Y_TILE)
        u_tile = rows(u, u_t, begin, end, x0, X, C, X_TILE)
        r_tile = rows(r, r_t, begin, end, y0, Y, C, Y_TILE) if GATE else y_tile
        weights = tl.where(seen, reading[:, None] * writing[None, :], 0.0)
        answers, _, pairs = answer(
            x_tile, y_tile, u_tile, r_tile, summed, reading, weights, scale, place_, False, GATE, REVERSE, PRECISION
        )
        mine = n < end - begin
        out_at = out + begin * H * Y + (n[:, None] * (H * Y) + column[None, :])
        tl.store(out_at, answers.to(out.dtype.element_ty), mask=mine[:, None] & (column < Y)[None, :])
        if GATE:
            tl.store(far_gate + begin * H + n * H, pairs, mask=mine)
        y_tile = (y_tile * writing[:, None]).to(y_tile.dtype)
        summed = tl.dot(tl.trans(x_tile), y_tile, acc=summed, input_precision=PRECISION)


@triton.jit
def segment_pass(
    x, y, u, r, out, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond, near_offset, far_offset,
    cu_seqlens, segment_ends,
    x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h, r_b, r_t, r_h, gates_b, gates_t, gates_h, x_state, y_state,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale, places, program, H, X, Y,
    C: tl.constexpr, X_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr, L_TILE: tl.constexpr,
    WINDOW: tl.constexpr, REVERSE: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr,
    HAS_START: tl.constexpr, STORE_END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One segment's outputs, one tile of the state; names as at the head of this file, r = query or key under GATE.

    Outputs are contiguous [parts, B, T, H, Y], one part for each tile of X; the gates are Pairs of triton_form.py.
    `places` = B * T * H. HAS_START: `starts` holds the states of all segments (of all sequences, if each has one
    segment only; then STORE_END writes the last states to `ends`).
    GATE, forwards: writes the states before all chunks and, for the decay, each token's pairs with earlier ones;
    backwards: its pairs with later ones of its chunk, with those behind it, and, in parts, the pairs around the chunk.
    """
    x_tiles, y_tiles = tl.cdiv(X, X_TILE), tl.cdiv(Y, Y_TILE)
    tile = program % (x_tiles * y_tiles)
    head = (program // (x_tiles * y_tiles)) % H
    segment = program // (x_tiles * y_tiles * H)
    part = tile // y_tiles
    x0, y0 = part * X_TILE, (tile % y_tiles) * Y_TILE
    sequence, row, index, low, high = place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE)
    if sequence < sequences:
        block, inner, start, stop = cut(index, low, high, window, per_block, WINDOW)
        head_ = head.to(tl.int64)
        x += row * x_b + head_ * x_h
        y += row * y_b + head_ * y_h
        u += row * u_b + head_ * u_h
        r += row * r_b + head_ * r_h
        gates += row * gates_b + head_ * gates_h
        rate = 0.0 if PER_TOKEN else tl.load(gates).to(tl.float32)
        out += (part.to(tl.int64) * places + row * tokens * H + head) * Y
        near_gate += tile.to(tl.int64) * places * (2 if REVERSE else 1) + row * tokens * H + head
        far_gate += tile.to(tl.int64) * places + row * tokens * H + head
        at = segment.to(tl.int64) * H + head
        n = tl.arange(0, C)
        column = y0 + tl.arange(0, Y_TILE)
        first = inner * chunks
        joined = False
        if WINDOW:
            joined = (stop < high) if REVERSE else (block > 0)
            if joined:
                neighbour_pass(
                    x, y, u, r, out, gates, rate, far_gate, beyond, near_offset, far_offset, x_t, y_t, u_t, r_t,
                    x_state, y_state, segment, head, first, start, stop, high, window, per_block, chunk,
                    chunks, scale, x0, y0, H, X, Y, C, X_TILE, Y_TILE, L_TILE, REVERSE, PER_TOKEN, GATE, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()  # below is read what other threads wrote
        start_at, within = state_tile(starts + at * X * Y, x0, y0, X, Y, x_state, y_state, X_TILE, Y_TILE)
        state = tl.load(start_at, mask=within, other=0.0) if HAS_START else tl.zeros([X_TILE, Y_TILE], tl.float32)
        count = tl.minimum(chunks, tl.cdiv(stop - start, chunk).to(tl.int32) - first)
        for step in range(0, count):
            m = count - 1 - step if REVERSE else step
            begin = start + (first + m) * chunk
            end = tl.minimum(begin + chunk, stop)
            chunk_at = (segment.to(tl.int64) * chunks + m) * H + head
            if WINDOW:
                since, rest, total = summed_decays(gates, rate, chunk_at, end - begin, C, PER_TOKEN)
            else:
                since, rest, total = decays(gates, gates_t, rate, begin, end, C, PER_TOKEN, PRECISION == "ieee")
            if REVERSE:
                reading = tl.exp(rest)
                writing = tl.exp(since) * scale
            else:
                reading = tl.exp(since) * scale
                writing = tl.exp(rest)
            x_tile = rows(x, x_t, begin, end, x0, X, C, X_TILE)
            y_tile = rows(y, y_t, begin, end, y0, Y, C, Y_TILE)
            u_tile = rows(u, u_t, begin, end, x0, X, C, X_TILE)
            r_tile = rows(r, r_t, begin, end, y0, Y, C, Y_TILE) if GATE else y_tile
            place_ = m * chunk + n
            weights = pair_decays(since, rate, place_, PER_TOKEN, REVERSE) * scale
            if GATE:
                kept_at, kept = state_tile(chunk_states + chunk_at * X * Y, x0, y0, X, Y, Y, 1, X_TILE, Y_TILE)
                if REVERSE:
                    before = tl.load(kept_at, mask=kept, other=0.0).to(tl.float32)
                    passing = tl.sum(before * state, axis=1) * tl.exp(total)
                    tl.store(around + (chunk_at * (x_tiles * y_tiles) + tile) * X_TILE + tl.arange(0, X_TILE), passing)
                else:
                    tl.store(kept_at, state.to(chunk_states.dtype.element_ty), mask=kept)
            answers, far, pairs = answer(
                x_tile, y_tile, u_tile, r_tile, state, reading, weights, scale, place_, True, GATE, REVERSE, PRECISION
            )
            mine = n < end - begin
            out_at = out + begin * H * Y + (n[:, None] * (H * Y) + column[None, :])
            real = mine[:, None] & (column < Y)[None, :]
            if WINDOW:
                answers += tl.load(out_at, mask=real & joined, other=0.0).to(tl.float32)
            tl.store(out_at, answers.to(out.dtype.element_ty), mask=real)
            if GATE:
                gate_at = near_gate + begin * H + n * H
                if REVERSE:
                    tl.store(gate_at, pairs - far, mask=mine)
                    tl.store(gate_at + places, far, mask=mine)
                else:
                    tl.store(gate_at, pairs, mask=mine)
            y_tile = (y_tile * writing[:, None]).to(y_tile.dtype)
            state = tl.dot(tl.trans(x_tile), y_tile, acc=state * tl.exp(total), input_precision=PRECISION)
        if STORE_END:
            end_at, whole = state_tile(ends + at * X * Y, x0, y0, X, Y, x_state, y_state, X_TILE, Y_TILE)
            tl.store(end_at, state, mask=whole)


@triton.jit(do_not_specialize=[*PLAIN, "places"])
def sweep(
    x, y, u, r, out, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond, near_offset, far_offset,
    cu_seqlens, segment_ends,
    x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h, r_b, r_t, r_h, gates_b, gates_t, gates_h, x_state, y_state,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale, places, H, X, Y,
    C: tl.constexpr, X_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr, L_TILE: tl.constexpr,
    WINDOW: tl.constexpr, REVERSE: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr,
    HAS_START: tl.constexpr, STORE_END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out, or d query, or one of d key and d value alone."""
    segment_pass(
        x, y, u, r, out, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond, near_offset,
        far_offset, cu_seqlens, segment_ends, x_b, x_t, x_h, y_b, y_t, y_h, u_b, u_t, u_h, r_b, r_t, r_h, gates_b,
        gates_t, gates_h, x_state, y_state, tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale,
        places, tl.program_id(0), H, X, Y, C, X_TILE, Y_TILE, N_TILE, L_TILE, WINDOW, REVERSE, PER_TOKEN, GATE,
        HAS_START, STORE_END, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*PLAIN, "places"])
def sweep_key_value(
    query, d_out, key, value, d_key, d_value, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond,
    near_offset, far_offset, cu_seqlens, segment_ends,
    query_b, query_t, query_h, d_out_b, d_out_t, d_out_h, key_b, key_t, key_h, value_b, value_t, value_h,
    gates_b, gates_t, gates_h, tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale, places,
    H, K, V, C: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, Y_TILE: tl.constexpr, N_TILE: tl.constexpr,
    L_TILE: tl.constexpr, WINDOW: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr, HAS_START: tl.constexpr,
    STORE_END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d value by even and d key by odd programs: neighbours read the same operands, the second from the L2 cache."""
    if tl.program_id(0) % 2 == 0:
        segment_pass(
            query, d_out, key, value, d_value, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond,
            near_offset, far_offset, cu_seqlens, segment_ends, query_b, query_t, query_h, d_out_b, d_out_t, d_out_h,
            key_b, key_t, key_h, value_b, value_t, value_h, gates_b, gates_t, gates_h, V, 1, tokens, sequences,
            per_sequence, window, per_block, chunk, chunks, scale, places, tl.program_id(0) // 2, H, K, V,
            C, K_TILE, Y_TILE, N_TILE, L_TILE, WINDOW, True, PER_TOKEN, False, HAS_START, STORE_END, PRECISION,
        )  # fmt: skip
    else:
        segment_pass(
            d_out, query, value, key, d_key, gates, near_gate, far_gate, chunk_states, around, starts, ends, beyond,
            near_offset, far_offset, cu_seqlens, segment_ends, d_out_b, d_out_t, d_out_h, query_b, query_t, query_h,
            value_b, value_t, value_h, key_b, key_t, key_h, gates_b, gates_t, gates_h, 1, V, tokens, sequences,
            per_sequence, window, per_block, chunk, chunks, scale, places, tl.program_id(0) // 2, H, V, K,
            C, V_TILE, Y_TILE, N_TILE, L_TILE, WINDOW, True, PER_TOKEN, GATE, HAS_START, False, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*PLAIN, "places", "tiles", "all_chunks"])
def sum_far_pairs(
    ending, starting, sums, cu_seqlens, segment_ends,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, places, tiles, all_chunks, H,
    C: tl.constexpr, H_TILE: tl.constexpr, N_TILE: tl.constexpr,
):  # fmt: skip
    """[2, chunks, H]: pairs with neighbouring blocks that end, and that start, in each chunk."""
    head, works, chunk_at, _, row, begin, count = chunk_place(
        cu_seqlens, segment_ends, tokens, sequences, per_sequence, window, per_block, chunk, chunks, H, H_TILE, N_TILE,
        True,
    )  # fmt: skip
    if works:
        n = tl.arange(0, C)
        at = (row * tokens + begin + n[:, None]) * H + head[None, :]
        mine = (n < count)[:, None] & (head < H)[None, :]
        ends = tl.zeros([C, H_TILE], tl.float32)
        starts = tl.zeros([C, H_TILE], tl.float32)
        for _ in range(0, tiles):
            ends += tl.load(ending + at, mask=mine, other=0.0)
            starts += tl.load(starting + at, mask=mine, other=0.0)
            ending += places
            starting += places
        to = sums + chunk_at * H + head
        tl.store(to, tl.sum(ends, axis=0), mask=head < H)
        tl.store(to + all_chunks.to(tl.int64) * H, tl.sum(starts, axis=0), mask=head < H)


@triton.jit(do_not_specialize=[*PLAIN, "places", "tiles", "all_chunks"])
def collect_pairs(
    ending, starting, around, far_ending, far_starting, far_sums, gate, cu_seqlens, segment_ends,
    tokens, sequences, per_sequence, window, per_block, chunk, chunks, places, tiles, all_chunks, H,
    C: tl.constexpr, ROWS: tl.constexpr, H_TILE: tl.constexpr, N_TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The decay's gradient, one chunk of H_TILE heads a program, from what two sweeps left.

    ending [tiles, B, T, H]; starting [tiles, 2, B, T, H], in the chunk and behind it; around [chunks, H, tiles, ROWS].
    With a window also the pairs with neighbouring blocks, far_... [tiles, B, T, H] and their sums by sum_far_pairs.
    """
    SUMS: tl.constexpr = 64
    head, works, chunk_at, in_block, row, begin, count = chunk_place(
        cu_seqlens, segment_ends, tokens, sequences, per_sequence, window, per_block, chunk, chunks, H, H_TILE, N_TILE,
        WINDOW,
    )  # fmt: skip
    if works:
        n = tl.arange(0, C)
        at = (row * tokens + begin + n[:, None]) * H + head[None, :]
        mine = (n < count)[:, None] & (head < H)[None, :]
        # of the token before each: a difference of sums would carry the rounding of the token's own
        preceded = mine & (n > 0)[:, None]
        parts = around + (((chunk_at * H + head) * (tiles * ROWS))[:, None] + tl.arange(0, ROWS)[None, :])
        ends = tl.zeros([C, H_TILE], tl.float32)
        starts_before = tl.zeros([C, H_TILE], tl.float32)
        passing = tl.zeros([H_TILE], tl.float32)
        for _ in range(0, tiles):
            ends += tl.load(ending + at, mask=mine, other=0.0) - tl.load(starting + at, mask=mine, other=0.0)
            starting += places
            starts_before += tl.load(starting + (at - H), mask=preceded, other=0.0)
            passing += tl.sum(tl.load(parts, mask=(head < H)[:, None], other=0.0), axis=1)
            if WINDOW:
                ends += tl.load(far_ending + at, mask=mine, other=0.0)
                starts_before += tl.load(far_starting + (at - H), mask=preceded, other=0.0)
                far_ending += places
                far_starting += places
            ending += places
            starting += places
            parts += ROWS
        if WINDOW:  # those that end in the block's later chunks, and those that start in its earlier ones
            in_all = chunk_at - in_block
            for base in range(0, per_block * chunks, SUMS):
                other = base + tl.arange(0, SUMS)
                sums_at = far_sums + (in_all + other)[:, None] * H + head[None, :]
                exists = (other < per_block * chunks)[:, None] & (head < H)[None, :]
                later = tl.load(sums_at, mask=exists & (other > in_block)[:, None], other=0.0)
                sums_at += all_chunks.to(tl.int64) * H
                earlier = tl.load(sums_at, mask=exists & (other < in_block)[:, None], other=0.0)
                passing += tl.sum(later + earlier, axis=0)
        total = tl.cumsum(ends, axis=0, reverse=True) + tl.cumsum(starts_before, axis=0) + passing[None, :]
        tl.store(gate + at, total, mask=mine)
