"""linear_decay in chunks of C tokens, without a loop over chunks.

With G_i the cumulative log decay inside a chunk and S the state at its start

    o_i   = exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i . k_j) v_j
    S_end = exp(G_C) S + sum over j of exp(G_C - G_j) k_j v_j^T

and the states at chunk starts are one product with the matrix exp(L_c - L_c'), c >= c', of decays between chunks
(the state-space duality of Mamba-2, Dao and Gu 2024). Windows: see kernels/blocks.py.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import blocks
from kernels.operands import RecurrentOutput, working_dtype

GROUP = 64  # chunks joined by one decay matrix; above that, groups of chunks are joined the same way


def chunk_states(local: Tensor, totals: Tensor, initial: Tensor | None) -> Tensor:
    """States at chunk starts and after the last chunk: [..., n, K, V], [..., n] -> [..., n + 1, K, V].

    `local` is what each chunk adds, `totals` its log decay. Decays between chunks are differences of float64 sums: at
    131,072 tokens a float32 sum would have lost 1e-4 of every factor.
    """
    n = local.shape[-3]
    if n > GROUP:
        return _grouped_states(local, totals, initial)
    since = F.pad(totals.double().cumsum(-1), (1, 0))
    difference = since.unsqueeze(-1) - since[..., 1:].unsqueeze(-2)
    written = torch.ones(n + 1, n, dtype=torch.bool, device=local.device).tril(-1)
    weights = difference.masked_fill(~written, float("-inf")).exp().to(local.dtype)
    states = (weights @ local.flatten(-2)).unflatten(-1, local.shape[-2:])
    if initial is not None:
        states = states + since.exp().to(local.dtype)[..., None, None] * initial.unsqueeze(-3)
    return states


def _grouped_states(local: Tensor, totals: Tensor, initial: Tensor | None) -> Tensor:
    n = local.shape[-3]
    padding = -n % GROUP
    local = F.pad(local, (0, 0, 0, 0, 0, padding)).unflatten(-3, (-1, GROUP))
    totals = F.pad(totals, (0, padding)).unflatten(-1, (-1, GROUP))
    within = chunk_states(local, totals, None)
    starts = chunk_states(within[..., -1, :, :], totals.sum(-1), initial)
    since = F.pad(totals.double().cumsum(-1), (1, 0))[..., :GROUP].exp().to(local.dtype)
    states = within[..., :GROUP, :, :] + since[..., None, None] * starts[..., :-1, None, :, :]
    return torch.cat([states.flatten(-4, -3)[..., :n, :, :], starts[..., -1:, :, :]], -3)


def linear_decay_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    chunk_size: int,
    bounds: list[int] | None = None,
) -> RecurrentOutput:
    if bounds is not None:
        return _packed(query, key, value, log_decay, initial_state, window, scale, chunk_size, bounds)
    work = working_dtype(query, key, value, log_decay, initial_state)
    dtype, tokens = value.dtype, query.shape[1]
    window = None if window is None or window >= tokens else window
    with torch.autocast(value.device.type, enabled=False):
        if log_decay.ndim == 1:  # one decay for the whole batch: keep B = 1, it broadcasts
            log_decay = log_decay.expand(1, tokens, -1)
        query, key, value, log_decay = (x.to(work) for x in (query, key, value, log_decay))
        initial = None if initial_state is None else initial_state.to(work)
        layout = blocks.plan(tokens, window, chunk_size)
        q, k, v = (blocks.cut(x, layout) for x in (query * scale, key, value))
        out, states = _chunked(q, k, v, blocks.cut_scalar(log_decay, layout), initial, window, layout)
        state = states[:, :, 0, -1] if window is None else _last_state(key, value, log_decay, window)
        return RecurrentOutput(blocks.join(out, layout).to(dtype), state)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, window: int | None, layout: blocks.Cut
) -> tuple[Tensor, Tensor]:
    since = blocks.run_cumsum(g, layout)  # from the chunk's start, this token's decay included
    rest = blocks.run_rest(g, layout)  # from after this token to the chunk's end
    scores = (q @ k.mT) * blocks.decays(g, layout)
    out, states = scores @ v, v
    totals = since[..., -1]
    if window is None or layout.chunks > 1:
        local = (k * rest.exp().unsqueeze(-1)).mT @ v
        states = chunk_states(local, totals, None if initial is None else initial.unsqueeze(2))
        out = out + (q * since.exp().unsqueeze(-1)) @ states[..., :-1, :, :]
    if window is not None:
        if layout.chunks > 1:
            since = since + blocks.earlier(totals, -1).unsqueeze(-1)
            rest = rest + blocks.later(totals, -1).unsqueeze(-1)
        out = out + blocks.tail(q * since.exp().unsqueeze(-1), k * rest.exp().unsqueeze(-1), v, layout)
    return out, states


def _last_state(key: Tensor, value: Tensor, log_decay: Tensor, window: int) -> Tensor:
    """The state made of the last `window` tokens, directly from its definition."""
    key, value, log_decay = (x[:, -window:] for x in (key, value, log_decay))
    rest = blocks.later(log_decay, 1).exp().unsqueeze(-1)
    return (key * rest).permute(0, 2, 3, 1) @ value.transpose(1, 2)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None, window: int | None,
    scale: float, chunk_size: int, bounds: list[int],
) -> RecurrentOutput:  # fmt: skip
    """Sequences packed along time, one after the other."""
    results = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        decay = log_decay if log_decay.ndim == 1 else log_decay[:, start:end]
        state = None if initial_state is None else initial_state[n : n + 1]
        q, k, v = (x[:, start:end] for x in (query, key, value))
        results.append(linear_decay_torch(q, k, v, decay, state, window, scale, chunk_size))
    return RecurrentOutput(*(torch.cat(x, dim) for x, dim in zip(zip(*results, strict=True), (1, 0), strict=True)))
