"""Checks of operands and the result type shared by the recurrent operations.

Dtype rule of every recurrent operation: states, decays and sums are float32 (float64 if any operand is float64), also
under autocast; `out` comes back in value's dtype, `state` in the working dtype.
"""

from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Impl = Literal["triton", "torch", "naive"]
IMPLS: tuple[str, ...] = get_args(Impl)


def default_impl(device: torch.device, dtype: torch.dtype) -> Impl:
    """What impl=None means: triton on CUDA, but for float64, which it refuses; torch elsewhere."""
    return "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"


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
    cu_seqlens: Tensor | None = None,
) -> list[int] | None:
    """Shapes of the operands that linear_decay and gated_delta_rule have in common; of data only cu_seqlens are read.

    Returns the boundaries of packed sequences as integers, None if nothing is packed.
    """
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
    bounds = None if cu_seqlens is None else packed_bounds(op, b, t, cu_seqlens)
    if initial_state is not None:
        n, letters = (b, "B, H, K, V") if bounds is None else (len(bounds) - 1, "N, H, K, V")
        check_shape(op, "initial_state", initial_state, (n, h, k, value.shape[-1]), letters)
        if window is not None:
            raise ValueError(
                f"{op}: initial_state is given with window {window}; expected window None, because a state does not "
                "say which of its tokens are still inside the window. Pass the earlier tokens themselves instead."
            )
    return bounds


def packed_bounds(op: str, batch: int, tokens: int, cu_seqlens: Tensor) -> list[int]:
    """cu_seqlens [N + 1] as integers: sequence i of a packed batch is tokens bounds[i] .. bounds[i + 1] - 1."""
    check_rank(op, "cu_seqlens", cu_seqlens, 1, "N + 1")
    if batch != 1:
        raise ValueError(f"{op}: B is {batch} with cu_seqlens; expected 1. Pack all sequences along time.")
    if cu_seqlens.is_floating_point():
        raise ValueError(f"{op}: cu_seqlens is {cu_seqlens.dtype}; expected integers. Pass int32 or int64.")
    bounds: list[int] = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"{op}: cu_seqlens is {bounds}; expected to rise from 0 to T = {tokens}. Give every sequence's first "
            "token, then T; leave out empty sequences."
        )
    return bounds


def working_dtype(*operands: Tensor | None) -> torch.dtype:
    """float64 if any operand is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in operands) else torch.float32
