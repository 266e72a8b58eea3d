"""Triton: what a chunk's tokens mean to one another, independent of the state.

With L_ij = exp(G_i - G_j) k_i . k_j for j < i of one window block, token i writes beta_i k_i z_i^T, where

    z = (I + L diag(beta))^-1 y,        y = v - exp(G) k S

(Yang et al. 2025, Gated delta networks; the unit triangle is kept, not T = (I + diag(beta) L)^-1 diag(beta), because
z is what d beta needs when beta is 0.) The inverse is exact: forward substitution inside 16-token diagonal blocks, then

    [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1 B^-1]

at 32 and 64. A doubling inverse of the whole triangle would lose everything on equal keys.
"""

import triton
import triton.language as tl


@triton.jit
def block_number(t, start, W, WINDOW: tl.constexpr):
    """Window block of tokens t of a sequence; without a window everything is block 0."""
    if WINDOW:
        return (t - start) // W
    else:
        return (t - start) * 0


@triton.jit
def decays(since, t, valid, block, TRANSPOSED: tl.constexpr):
    """[C, C] exp(G_i - G_j) where token i sees token j (j <= i, one block), else 0; [j, i] if TRANSPOSED.

    Masked before exp, whose other half would overflow. The diagonal is a constant 1, without a gradient.
    """
    if TRANSPOSED:
        seen = (t[:, None] < t[None, :]) & valid[None, :] & (block[:, None] == block[None, :])
        difference = since[None, :] - since[:, None]
    else:
        seen = (t[:, None] > t[None, :]) & valid[:, None] & (block[:, None] == block[None, :])
        difference = since[:, None] - since[None, :]
    own = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    return tl.exp(tl.where(seen, difference, float("-inf"))) + own


@triton.jit
def within(earlier, earlier_block, later, later_block):
    """Sums that start anew with each window block, as an associative operation on (sum, block)."""
    return later + tl.where(earlier_block == later_block, earlier, 0.0), later_block


@triton.jit
def split_blocks(x, N: tl.constexpr, SIDE: tl.constexpr):
    """[2 N, SIDE, SIDE] -> the even and the odd blocks, [N, SIDE, SIDE] each."""
    return tl.split(tl.permute(tl.reshape(x, [N, 2, SIDE, SIDE]), (0, 2, 3, 1)))


@triton.jit
def join_halves(inverse, a, row, column, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks of SIDE from those of SIDE / 2."""
    below = (row // SIDE == column // SIDE) & (row // (SIDE // 2) != column // (SIDE // 2))
    joined = tl.dot(tl.where(below, a, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, joined, input_precision=PRECISION)


@triton.jit
def invert_blocks(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of every [16, 16] of a, strictly lower triangular: blocks of 2, 4, 8 and 16 joined exactly."""
    place = tl.arange(0, 16)
    row = place[None, :, None]
    column = place[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, a, 0.0)
    inverse = join_halves(inverse, a, row, column, 4, PRECISION)
    inverse = join_halves(inverse, a, row, column, 8, PRECISION)
    return join_halves(inverse, a, row, column, 16, PRECISION)


@triton.jit
def faded_products(products, since, rate, t, valid, block, since_to, t_to, block_to):
    """beta_j exp(G_i - G_j) k_i . k_j of every pair i > j of one window block, else 0; arrays [n, side]."""
    seen = (t[:, :, None] > t_to[:, None, :]) & valid[:, :, None] & (block[:, :, None] == block_to[:, None, :])
    difference = since[:, :, None] - since_to[:, None, :]
    return products * tl.exp(tl.where(seen, difference, float("-inf"))) * rate[:, None, :]


@triton.jit(do_not_specialize=["W"])
def factors_kernel(
    k, g, beta, inverse, since, rest, chunks,
    k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, s_b, s_t,
    H, K, W,
    C: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the inverse, and log decay summed since and until the ends of the block in the chunk.

    Only the lower 16-token blocks are made: the diagonal ones, those that join two to 32 tokens, the one of 32 to 64.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // H, program % H
    b = tl.load(chunks + chunk * 4).to(tl.int64)
    first = tl.load(chunks + chunk * 4 + 1)
    start = tl.load(chunks + chunk * 4 + 2)
    end = tl.load(chunks + chunk * 4 + 3)
    k += b * k_b + h * k_h
    g += b * g_b + h * g_h
    beta += b * beta_b + h * beta_h
    since += b * s_b + h
    rest += b * s_b + h
    inverse += program * C * C
    NB: tl.constexpr = C // 16
    dtype = inverse.dtype.element_ty

    t = first + tl.arange(0, C)
    t64 = t.to(tl.int64)
    valid = t < end
    block = block_number(t, start, W, WINDOW)
    decay = tl.load(g + t64 * g_t, mask=valid, other=0.0)
    # the next token's decay, if it is of the same block and chunk: summed from the end it is what is left after a token
    after = valid & (t + 1 < tl.minimum(first + C, end)) & (block_number(t + 1, start, W, WINDOW) == block)
    decay_after = tl.load(g + (t64 + 1) * g_t, mask=after, other=0.0)
    if WINDOW:
        until, _block = tl.associative_scan((decay, block), 0, within)
        left, _block = tl.associative_scan((decay_after, block), 0, within, reverse=True)
    else:
        until = tl.cumsum(decay, 0)
        left = tl.cumsum(decay_after, 0, reverse=True)
    tl.store(since + t64 * s_t, until, mask=valid)
    tl.store(rest + t64 * s_t, left, mask=valid)
    rate = tl.load(beta + t64 * beta_t, mask=valid, other=0.0)

    column = tl.arange(0, BK)
    blocks = tl.zeros([NB, 16, 16], tl.float32)
    t_16 = tl.reshape(t, [NB, 16])
    valid_16 = t_16 < end
    block_16 = block_number(t_16, start, W, WINDOW)
    since_16 = tl.reshape(until, [NB, 16])
    rate_16 = tl.reshape(rate, [NB, 16])
    for at in range(0, K, BK):
        inside = valid_16[:, :, None] & (at + column < K)[None, None, :]
        keys = tl.load(k + t_16.to(tl.int64)[:, :, None] * k_t + (at + column)[None, None, :], mask=inside, other=0.0)
        blocks += tl.dot(keys, tl.permute(keys, (0, 2, 1)), input_precision=PRECISION)
    blocks = faded_products(blocks, since_16, rate_16, t_16, valid_16, block_16, since_16, t_16, block_16)
    blocks = invert_blocks(blocks, SOLVE)
    place = tl.arange(0, 16)
    if NB == 1:
        tl.store(
            inverse + tl.arange(0, 1)[:, None, None] + place[None, :, None] * C + place[None, None, :], blocks.to(dtype)
        )
    else:
        PAIRS: tl.constexpr = NB // 2
        pair = tl.arange(0, PAIRS)[:, None] * 32 + place[None, :]
        t_early, t_late = first + pair, first + pair + 16
        across = tl.zeros([PAIRS, 16, 16], tl.float32)
        for at in range(0, K, BK):
            in_key = (at + column < K)[None, None, :]
            key_at = (at + column)[None, None, :]
            early = tl.load(
                k + t_early.to(tl.int64)[:, :, None] * k_t + key_at,
                mask=(t_early < end)[:, :, None] & in_key,
                other=0.0,
            )
            late = tl.load(
                k + t_late.to(tl.int64)[:, :, None] * k_t + key_at, mask=(t_late < end)[:, :, None] & in_key, other=0.0
            )
            across += tl.dot(late, tl.permute(early, (0, 2, 1)), input_precision=PRECISION)
        since_early, since_late = tl.split(tl.permute(tl.reshape(until, [PAIRS, 2, 16]), (0, 2, 1)))
        rate_early, _rate = tl.split(tl.permute(tl.reshape(rate, [PAIRS, 2, 16]), (0, 2, 1)))
        across = faded_products(
            across, since_late, rate_early, t_late, t_late < end, block_number(t_late, start, W, WINDOW),
            since_early, t_early, block_number(t_early, start, W, WINDOW),
        )  # fmt: skip
        blocks_early, blocks_late = split_blocks(blocks, PAIRS, 16)
        across = tl.dot(blocks_late, tl.dot(across, blocks_early, input_precision=SOLVE), input_precision=SOLVE)
        side = tl.arange(0, 2)
        down, right = side[None, :, None, None, None], side[None, None, None, :, None]
        own = tl.reshape(blocks, [PAIRS, 2, 16, 1, 16])
        other = tl.reshape(across, [PAIRS, 1, 16, 1, 16])
        blocks = tl.reshape(tl.where(down == right, own, tl.where(down > right, -other, 0.0)), [PAIRS, 32, 32])
        place = tl.arange(0, 32)
        to = tl.arange(0, PAIRS)[:, None, None] * 32 * (C + 1) + place[None, :, None] * C + place[None, None, :]
        tl.store(inverse + to, blocks.to(dtype))
        if PAIRS == 2:
            t_early = first + tl.arange(0, 1)[:, None] + place[None, :]
            t_late = t_early + 32
            joined = tl.zeros([1, 32, 32], tl.float32)
            for at in range(0, K, BK):
                in_key = (at + column < K)[None, None, :]
                key_at = (at + column)[None, None, :]
                early = tl.load(
                    k + t_early.to(tl.int64)[:, :, None] * k_t + key_at,
                    mask=(t_early < end)[:, :, None] & in_key,
                    other=0.0,
                )
                late = tl.load(
                    k + t_late.to(tl.int64)[:, :, None] * k_t + key_at,
                    mask=(t_late < end)[:, :, None] & in_key,
                    other=0.0,
                )
                joined += tl.dot(late, tl.permute(early, (0, 2, 1)), input_precision=PRECISION)
            since_early, since_late = tl.split(tl.permute(tl.reshape(until, [1, 2, 32]), (0, 2, 1)))
            rate_early, _rate = tl.split(tl.permute(tl.reshape(rate, [1, 2, 32]), (0, 2, 1)))
            joined = faded_products(
                joined, since_late, rate_early, t_late, t_late < end, block_number(t_late, start, W, WINDOW),
                since_early, t_early, block_number(t_early, start, W, WINDOW),
            )  # fmt: skip
            blocks_early, blocks_late = split_blocks(blocks, 1, 32)
            joined = tl.dot(blocks_late, tl.dot(joined, blocks_early, input_precision=SOLVE), input_precision=SOLVE)
            to = tl.arange(0, 1)[:, None, None] + place[None, :, None] * C + place[None, None, :]
            tl.store(inverse + 32 * C + to, (-joined).to(dtype))
            tl.store(inverse + 32 + to, tl.zeros([1, 32, 32], dtype))
