"""Short causal depthwise convolution: out_t = act(bias + sum over i of weight[:, i] * x_{t - W + 1 + i})."""

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels.operands import Impl, check_impl, check_rank, check_shape, packed_bounds
from kernels.short_conv.naive import short_conv_naive
from kernels.short_conv.torch_form import short_conv_torch

__all__ = ["ShortConvOutput", "short_conv"]


class ShortConvOutput(NamedTuple):
    """Output, and the last W - 1 inputs, which are `initial` of the next piece of the sequence."""

    out: Float[Tensor, "B T C"]
    tail: Float[Tensor, "B W-1 C"] | Float[Tensor, "N W-1 C"]


def short_conv(
    *,
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None = None,
    activation: Literal["silu"] | None = None,
    initial: Float[Tensor, "B W-1 C"] | Float[Tensor, "N W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    impl: Impl = "torch",
) -> ShortConvOutput:
    """Causal depthwise convolution with optional SiLU; C counts channels and W taps here, the last tap sees x_t.

    Inputs before the first token are `initial`, or zeros. Sums are float32 (float64 for float64 operands); out and tail
    have x's dtype. `cu_seqlens` = 0, end of sequence 1, ..., T packs N sequences along time (B = 1; initial and tail
    are then [N, W-1, C]): no tap reaches over a boundary. It is read by the host. "triton" takes bfloat16, float16 and
    float32. Raises ValueError for shapes that do not fit, another activation, unknown impl, or operands that the impl
    cannot take.
    """
    op = "short_conv"
    check_impl(op, impl)
    check_rank(op, "x", x, 3, "B, T, C")
    check_rank(op, "weight", weight, 2, "C, W")
    channels, width = x.shape[2], weight.shape[1]
    check_shape(op, "weight", weight, (channels, width), "C, W")
    if width < 1 or x.shape[1] < 1:
        raise ValueError(f"{op}: x has {x.shape[1]} tokens, weight {width} taps; expected at least 1 of each.")
    if bias is not None:
        check_shape(op, "bias", bias, (channels,), "C")
    bounds = None if cu_seqlens is None else packed_bounds(op, x.shape[0], x.shape[1], cu_seqlens)
    if initial is not None:
        n, letter = (x.shape[0], "B") if bounds is None else (len(bounds) - 1, "N")
        check_shape(op, "initial", initial, (n, width - 1, channels), f"{letter}, W-1, C")
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation is {activation!r}; expected 'silu' or None. Apply others to the output.")
    if impl == "triton":
        from kernels.short_conv.triton_form import short_conv_triton

        return ShortConvOutput(*short_conv_triton(x, weight, bias, activation, initial, cu_seqlens))
    form = short_conv_naive if impl == "naive" else short_conv_torch
    if bounds is None:
        return ShortConvOutput(*form(x, weight, bias, activation, initial))
    pieces = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        before = None if initial is None else initial[n : n + 1]
        pieces.append(form(x[:, start:end], weight, bias, activation, before))
    return ShortConvOutput(torch.cat([out for out, _ in pieces], 1), torch.cat([tail for _, tail in pieces]))
