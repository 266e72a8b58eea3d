"""Checks of operands and the result type shared by the recurrent operations.

Dtype rule of every recurrent operation: states, decays and sums are float32 (float64 if any operand is float64), also
under autocast; `out` comes back in value's dtype, `state` in the working dtype.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Impl = Literal["torch", "naive"]
IMPLS: tuple[str, ...] = get_args(Impl)


class RecurrentOutput(NamedTuple):
    """Output of a recurrent operation and the state after its last token (working dtype)."""

    out: Float[Tensor, "B T H V"]
    state: Float[Tensor, "B H K V"]


def check_impl(op: str, impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl is {impl!r}; expected one of {', '.join(IMPLS)}. Choose a form that exists.")


def check_shape(op: str, name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; expected [{letters}] = {expected}. "
            "Time comes before heads in every operand."
        )


def check_rank(op: str, name: str, tensor: Tensor, rank: int, letters: str) -> None:
    if tensor.ndim != rank:
        raise ValueError(f"{op}: {name} has {tensor.ndim} dimensions; expected {rank}, [{letters}]. Reshape {name}.")


def check_recurrent(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    chunk_size: int,
) -> None:
    """Shapes of the operands that linear_decay and gated_delta_rule have in common; data are not looked at."""
    check_rank(op, "query", query, 4, "B, T, H, K")
    check_rank(op, "value", value, 4, "B, T, H, V")
    b, t, h, k = query.shape
    check_shape(op, "key", key, (b, t, h, k), "B, T, H, K")
    check_shape(op, "value", value, (b, t, h, value.shape[-1]), "B, T, H, V")
    if min(query.shape) < 1 or value.shape[-1] < 1:
        raise ValueError(
            f"{op}: query has shape {tuple(query.shape)}, value {tuple(value.shape)}; expected no empty dimension. "
            "Pass at least one token."
        )
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}; expected at least 1. Leave it at its default, 64.")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window is {window}; expected at least 1 (a token sees itself), or None for all.")
    if initial_state is not None:
        check_shape(op, "initial_state", initial_state, (b, h, k, value.shape[-1]), "B, H, K, V")
        if window is not None:
            raise ValueError(
                f"{op}: initial_state is given with window {window}; expected window None, because a state does not "
                "say which of its tokens are still inside the window. Pass the earlier tokens themselves instead."
            )


def working_dtype(*operands: Tensor | None) -> torch.dtype:
    """float64 if any operand is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in operands) else torch.float32
