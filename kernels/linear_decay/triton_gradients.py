"""d key and d value of one segment by one program, for tiles small enough that both orientations of the state fit.

The two sweeps backwards of triton_sweep.py (letters are explained there) read the same tokens and decay alike; together
they load and exponentiate once, and the products of one run while those of the other are waited for. The state is still
kept in both orientations, each made as it is used.
"""

import triton
import triton.language as tl

from kernels.linear_decay.triton_sweep import PLAIN, answer, cut, decays, pair_decays, place, rows, state_tile


@triton.jit(do_not_specialize=PLAIN)
def sweep_together(
    query, d_out, key, value, d_key, d_value, gates, starts, ends, cu_seqlens, segment_ends,
    query_b, query_t, query_h, d_out_b, d_out_t, d_out_h, key_b, key_t, key_h, value_b, value_t, value_h,
    gates_b, gates_t, gates_h, tokens, sequences, per_sequence, window, per_block, chunk, chunks, scale, H, K, V,
    C: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, N_TILE: tl.constexpr, PER_TOKEN: tl.constexpr,
    HAS_START: tl.constexpr, STORE_END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As sweep_key_value without a window; d_key and d_value have one part, so K <= K_TILE and V <= V_TILE."""
    head = tl.program_id(0) % H
    segment = tl.program_id(0) // H
    sequence, row, index, low, high = place(segment, cu_seqlens, segment_ends, tokens, sequences, per_sequence, N_TILE)
    if sequence < sequences:
        _block, inner, start, stop = cut(index, low, high, window, per_block, False)
        head_ = head.to(tl.int64)
        query += row * query_b + head_ * query_h
        d_out += row * d_out_b + head_ * d_out_h
        key += row * key_b + head_ * key_h
        value += row * value_b + head_ * value_h
        gates += row * gates_b + head_ * gates_h
        rate = 0.0 if PER_TOKEN else tl.load(gates).to(tl.float32)
        d_key += (row * tokens * H + head) * K
        d_value += (row * tokens * H + head) * V
        at = segment.to(tl.int64) * H + head
        n = tl.arange(0, C)
        k_column = tl.arange(0, K_TILE)
        v_column = tl.arange(0, V_TILE)
        first = inner * chunks
        start_at, within = state_tile(starts + at * K * V, 0, 0, K, V, V, 1, K_TILE, V_TILE)
        start_at_t, within_t = state_tile(starts + at * K * V, 0, 0, V, K, 1, V, V_TILE, K_TILE)
        if HAS_START:
            state = tl.load(start_at, mask=within, other=0.0)
            state_t = tl.load(start_at_t, mask=within_t, other=0.0)
        else:
            state = tl.zeros([K_TILE, V_TILE], tl.float32)
            state_t = tl.zeros([V_TILE, K_TILE], tl.float32)
        count = tl.minimum(chunks, tl.cdiv(stop - start, chunk).to(tl.int32) - first)
        for step in range(0, count):
            m = count - 1 - step
            begin = start + (first + m) * chunk
            end = tl.minimum(begin + chunk, stop)
            since, rest, total = decays(gates, gates_t, rate, begin, end, C, PER_TOKEN, PRECISION == "ieee")
            q = rows(query, query_t, begin, end, 0, K, C, K_TILE)
            do = rows(d_out, d_out_t, begin, end, 0, V, C, V_TILE)
            k = rows(key, key_t, begin, end, 0, K, C, K_TILE)
            v = rows(value, value_t, begin, end, 0, V, C, V_TILE)
            place_ = m * chunk + n
            reading = tl.exp(rest)
            writing = tl.exp(since) * scale
            weights = pair_decays(since, rate, place_, PER_TOKEN, True) * scale
            of_value, _, _ = answer(q, do, k, k, state, reading, weights, scale, place_, True, False, True, PRECISION)
            of_key, _, _ = answer(do, q, v, v, state_t, reading, weights, scale, place_, True, False, True, PRECISION)
            mine = n < end - begin
            value_at = d_value + begin * H * V + (n[:, None] * (H * V) + v_column[None, :])
            key_at = d_key + begin * H * K + (n[:, None] * (H * K) + k_column[None, :])
            tl.store(value_at, of_value.to(d_value.dtype.element_ty), mask=mine[:, None] & (v_column < V)[None, :])
            tl.store(key_at, of_key.to(d_key.dtype.element_ty), mask=mine[:, None] & (k_column < K)[None, :])
            passed = tl.exp(total)
            weighted = (do * writing[:, None]).to(do.dtype)
            state = tl.dot(tl.trans(q), weighted, acc=state * passed, input_precision=PRECISION)
            weighted_q = (q * writing[:, None]).to(q.dtype)
            state_t = tl.dot(tl.trans(do), weighted_q, acc=state_t * passed, input_precision=PRECISION)
        if STORE_END:
            end_at, whole = state_tile(ends + at * K * V, 0, 0, K, V, V, 1, K_TILE, V_TILE)
            tl.store(end_at, state, mask=whole)
