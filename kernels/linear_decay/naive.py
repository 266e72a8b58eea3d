"""linear_decay as a token loop in float64, the law the other forms are tested against.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

With a window, S_t is made again for every t from its last `window` tokens only.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import RecurrentOutput, working_dtype


def step(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """One token: [..., K, V], [..., K], [..., V], [...] -> [..., K, V]."""
    return log_decay.exp()[..., None, None] * state + key[..., :, None] * value[..., None, :]


def delayed(x: Tensor, age: int) -> Tensor:
    """x_{t-age} at every t; zeros (a token that changes nothing) before the first."""
    return F.pad(x.movedim(1, -1), (age, 0))[..., : x.shape[1]].movedim(-1, 1)


def linear_decay_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    bounds: list[int] | None = None,
) -> RecurrentOutput:
    if bounds is not None:
        return _packed(query, key, value, log_decay, initial_state, window, scale, bounds)
    work = working_dtype(query, key, value, log_decay, initial_state)
    dtype, tokens = value.dtype, query.shape[1]
    query, key, value, log_decay = (x.double() for x in (query, key, value, log_decay))
    log_decay = log_decay.expand(query.shape[:3])
    if window is not None and window < tokens:
        states = query.new_zeros(*key.shape, value.shape[-1])
        for age in reversed(range(window)):
            states = step(states, delayed(key, age), delayed(value, age), delayed(log_decay, age))
    else:
        state = torch.zeros_like(key[:, 0, :, :, None] * value[:, 0, :, None, :])
        state = state if initial_state is None else initial_state.double()
        history = []
        for k_t, v_t, g_t in zip(key.unbind(1), value.unbind(1), log_decay.unbind(1), strict=True):
            state = step(state, k_t, v_t, g_t)
            history.append(state)
        states = torch.stack(history, 1)
    out = scale * torch.einsum("bthk,bthkv->bthv", query, states)
    return RecurrentOutput(out.to(dtype), states[:, -1].to(work))


def _packed(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None, window: int | None,
    scale: float, bounds: list[int],
) -> RecurrentOutput:  # fmt: skip
    """Sequences packed along time, one after the other."""
    results = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        decay = log_decay if log_decay.ndim == 1 else log_decay[:, start:end]
        state = None if initial_state is None else initial_state[n : n + 1]
        q, k, v = (x[:, start:end] for x in (query, key, value))
        results.append(linear_decay_naive(q, k, v, decay, state, window, scale))
    return RecurrentOutput(*(torch.cat(x, dim) for x, dim in zip(zip(*results, strict=True), (1, 0), strict=True)))
