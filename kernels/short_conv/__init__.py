"""Short causal depthwise convolution: out_t = act(bias + sum over i of weight[:, i] * x_{t - W + 1 + i})."""

from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from kernels.operands import Impl, check_impl, check_rank, check_shape
from kernels.short_conv.naive import short_conv_naive
from kernels.short_conv.torch_form import short_conv_torch

__all__ = ["ShortConvOutput", "short_conv"]


class ShortConvOutput(NamedTuple):
    """Output, and the last W - 1 inputs, which are `initial` of the next piece of the sequence."""

    out: Float[Tensor, "B T C"]
    tail: Float[Tensor, "B W-1 C"]


def short_conv(
    *,
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None = None,
    activation: Literal["silu"] | None = None,
    initial: Float[Tensor, "B W-1 C"] | None = None,
    impl: Impl = "torch",
) -> ShortConvOutput:
    """Causal depthwise convolution with optional SiLU; C counts channels and W taps here, the last tap sees x_t.

    Inputs before the first token are `initial`, or zeros. Sums are float32 (float64 for float64 operands); out and tail
    have x's dtype. Raises ValueError for shapes that do not fit, another activation, or unknown impl.
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
    if initial is not None:
        check_shape(op, "initial", initial, (x.shape[0], width - 1, channels), "B, W-1, C")
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation is {activation!r}; expected 'silu' or None. Apply others to the output.")
    form = short_conv_naive if impl == "naive" else short_conv_torch
    return ShortConvOutput(*form(x, weight, bias, activation, initial))
