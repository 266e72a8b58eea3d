"""gated_delta_rule in chunks of C tokens (WY form), without a loop over chunks.

Inside a chunk, with G_i the cumulative log decay and S the state at its start, every token writes k_i u_i^T with

    u_i = beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j)

that is (I + A) u = beta v - beta exp(G) k S, A strictly lower triangular, so with N = (I + A)^-1 each chunk is an
affine map of the state, S_end = M S + X, and so is what it reads (Yang et al. 2024, Parallelizing linear transformers
with the delta rule; Yang et al. 2025, Gated delta networks). Chunk maps are composed by an associative scan. The
inverse comes from forward substitution: a doubling (Neumann) inverse of a 64-token triangle is wrong by 1e9 on
identical keys. Float32 limit: equal keys with beta near 2 and no decay, 64 undamped reflections a chunk, carry errors
of 2e-5, the rounding of k . k times their number.
Windows: see kernels/blocks.py; pulled-back queries and carried keys come from the same factors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import blocks
from kernels.gated_delta_rule.naive import sequences
from kernels.operands import RecurrentOutput, working_dtype


class Factors(NamedTuple):
    """One chunk as maps of the state S at its start (working layout)."""

    own: Tensor  # [..., C, V] what queries read from their own chunk
    pulled_back: Tensor  # [..., C, K] q~: o = own + q~ S
    carried: Tensor  # [..., C, K] k~: the chunk adds k~^T v to its end state (each run its own, if there are runs)
    faded: Tensor  # [..., C, K] exp(G) k
    total: Tensor  # [...] the chunk's log decay

    def transition(self) -> Tensor:
        """[..., K, K] M = exp(G_C) I - k~^T (exp(G) k)."""
        identity = torch.eye(self.faded.shape[-1], dtype=self.faded.dtype, device=self.faded.device)
        return self.total.exp()[..., None, None] * identity - self.carried.mT @ self.faded


def affine_states(transition: Tensor, added: Tensor, initial: Tensor) -> Tensor:
    """All states of S_{c+1} = M_c S_c + X_c: [..., n, K, K], [..., n, K, V], [..., K, V] -> [..., n + 1, K, V].

    Neighbours are composed into pairs until one map is left, then the states between are filled in: O(n) products in
    O(log n) batched steps.
    """
    n = transition.shape[-3]
    first, x_first = transition[..., ::2, :, :], added[..., ::2, :, :]
    if n == 1:
        even = initial.unsqueeze(-3)
    else:
        second, x_second = transition[..., 1::2, :, :], added[..., 1::2, :, :]
        paired, x_paired = first[..., : n // 2, :, :], x_first[..., : n // 2, :, :]
        even = affine_states(second @ paired, second @ x_paired + x_second, initial)
    odd = first @ even[..., : first.shape[-3], :, :] + x_first
    common = odd.shape[-3]
    states = torch.stack([even[..., :common, :, :], odd], -3).flatten(-4, -3)
    return states if n % 2 else torch.cat([states, even[..., -1:, :, :]], -3)


def _factors(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: blocks.Cut) -> Factors:
    since = blocks.run_cumsum(g, layout)
    decay = blocks.decays(g, layout)
    beta = beta.unsqueeze(-1)
    triangle = (k @ k.mT) * decay * beta
    identity = torch.eye(layout.chunk, dtype=q.dtype, device=q.device)
    # unitriangular: the diagonal is taken as 1 and not read, so it need not be cleared
    inverse = torch.linalg.solve_triangular(triangle.tril(-1) + identity, identity, upper=False, unitriangular=True)
    inverse = inverse * beta.mT  # N diag(beta)
    read = ((q @ k.mT) * decay) @ inverse
    rest = k * blocks.run_rest(g, layout).exp().unsqueeze(-1)
    since_start = since.exp().unsqueeze(-1)
    faded = k * since_start
    return Factors(read @ v, q * since_start - read @ faded, inverse.mT @ rest, faded, since[..., -1])


def gated_delta_rule_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    chunk_size: int,
    bounds: list[int] | None = None,
) -> RecurrentOutput:
    if bounds is not None:
        parts = [
            gated_delta_rule_torch(
                query[:, t],
                key[:, t],
                value[:, t],
                log_decay[:, t],
                beta[:, t],
                None if initial_state is None else initial_state[n],
                window,
                scale,
                chunk_size,
            )
            for n, t in sequences(bounds)
        ]
        return RecurrentOutput(torch.cat([x.out for x in parts], 1), torch.cat([x.state for x in parts]))
    work = working_dtype(query, key, value, log_decay, beta, initial_state)
    dtype, tokens = value.dtype, query.shape[1]
    window = None if window is None or window >= tokens else window
    with torch.autocast(value.device.type, enabled=False):
        query, key, value, log_decay, beta = (x.to(work) for x in (query, key, value, log_decay, beta))
        layout = blocks.plan(tokens, window, chunk_size)
        q, k, v = (blocks.cut(x, layout) for x in (query * scale, key, value))
        g, b = (blocks.cut_scalar(x, layout) for x in (log_decay, beta))
        factors = _factors(q, k, v, g, b, layout)
        if window is None:
            out, state = _unrestricted(factors, v, None if initial_state is None else initial_state.to(work))
        elif layout.chunks > 1:
            out, state = _windowed(factors, v, layout)
        else:  # whole windows inside one chunk: no state crosses a chunk
            out = factors.own + blocks.tail(factors.pulled_back, factors.carried, v, layout)
            query, key, value, log_decay, beta = (x[:, -window:] for x in (query, key, value, log_decay, beta))
            state = gated_delta_rule_torch(query, key, value, log_decay, beta, None, None, scale, chunk_size).state
        return RecurrentOutput(blocks.join(out, layout).to(dtype), state)


def _unrestricted(factors: Factors, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    added = factors.carried.mT @ v
    initial = added.new_zeros(added[:, :, :, 0].shape) if initial is None else initial.unsqueeze(2)
    states = affine_states(factors.transition(), added, initial)
    return factors.own + factors.pulled_back @ states[..., :-1, :, :], states[:, :, 0, -1]


def _windowed(factors: Factors, v: Tensor, layout: blocks.Cut) -> tuple[Tensor, Tensor]:
    """Blocks of several chunks: states and transitions from each block's start, then the previous block's tail."""
    transition = factors.transition()
    width = transition.shape[-1]
    added = factors.carried.mT @ v
    # one scan for both: columns [state | transition], started at [0 | I] in every block
    identity = torch.eye(width, dtype=v.dtype, device=v.device).expand_as(transition[..., 0, :, :])
    start = torch.cat([torch.zeros_like(added[..., 0, :, :]), identity], -1)
    scanned = affine_states(transition, torch.nn.functional.pad(added, (0, width)), start)
    states, since = scanned.split([v.shape[-1], width], -1)
    # the same scan from the other end: what is left of each block after each chunk, transposed
    left = affine_states(transition.mT.flip(-3), torch.zeros_like(transition), identity)[..., :-1, :, :].flip(-3)
    pulled_back = factors.pulled_back @ since[..., :-1, :, :]
    carried = factors.carried @ left
    out = factors.own + factors.pulled_back @ states[..., :-1, :, :]
    out = out + blocks.tail(pulled_back, carried, v, layout)
    # state of the last `block` tokens: the last block's own and what the window still holds of the one before
    seen = layout.tokens - (layout.blocks - 1) * layout.block
    carried, v = (x[:, :, -2].flatten(2, 3)[:, :, seen : layout.block] for x in (carried, v))
    return out, states[:, :, -1, -1] + since[:, :, -1, -1] @ (carried.mT @ v)
