"""gated_delta_rule as a token loop in float64, the law the other forms are tested against.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

With a window, S_t is made again for every t from its last `window` tokens only. Packed sequences are taken one by one.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import RecurrentOutput, working_dtype


def step(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token: [..., K, V], [..., K], [..., V], [...], [...] -> [..., K, V]."""
    state = log_decay.exp()[..., None, None] * state
    read = (key[..., None, :] @ state).squeeze(-2)
    return state + key[..., :, None] * (beta[..., None] * (value - read))[..., None, :]


def sequences(bounds: list[int]) -> Iterator[tuple[slice, slice]]:
    """Of every packed sequence its row of the states and its tokens."""
    for number, (start, end) in enumerate(pairwise(bounds)):
        yield slice(number, number + 1), slice(start, end)


def delayed(x: Tensor, age: int) -> Tensor:
    """x_{t-age} at every t; zeros (a token that changes nothing) before the first."""
    return F.pad(x.movedim(1, -1), (age, 0))[..., : x.shape[1]].movedim(-1, 1)


def gated_delta_rule_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    bounds: list[int] | None = None,
) -> RecurrentOutput:
    if bounds is not None:
        parts = [
            gated_delta_rule_naive(
                query[:, t],
                key[:, t],
                value[:, t],
                log_decay[:, t],
                beta[:, t],
                None if initial_state is None else initial_state[n],
                window,
                scale,
            )
            for n, t in sequences(bounds)
        ]
        return RecurrentOutput(torch.cat([x.out for x in parts], 1), torch.cat([x.state for x in parts]))
    work = working_dtype(query, key, value, log_decay, beta, initial_state)
    dtype, tokens = value.dtype, query.shape[1]
    query, *token = (x.double() for x in (query, key, value, log_decay, beta))
    if window is not None and window < tokens:
        states = query.new_zeros(*key.shape, value.shape[-1])
        for age in reversed(range(window)):
            states = step(states, *(delayed(x, age) for x in token))
    else:
        state = query.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[-1])
        state = state if initial_state is None else initial_state.double()
        history = []
        for k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in token), strict=True):
            state = step(state, k_t, v_t, g_t, beta_t)
            history.append(state)
        states = torch.stack(history, 1)
    out = scale * torch.einsum("bthk,bthkv->bthv", query, states)
    return RecurrentOutput(out.to(dtype), states[:, -1].to(work))
