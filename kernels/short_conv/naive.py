"""short_conv as a loop over tokens in float64, the law the other forms are tested against.

y_t = bias + sum over i of weight[:, i] * x_{t - W + 1 + i}        out_t = y_t or y_t * sigmoid(y_t)
"""

import torch
from torch import Tensor


def short_conv_naive(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    width, dtype = weight.shape[1], x.dtype
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial is None else initial.to(dtype)
    inputs = torch.cat([before, x], 1)
    out = []
    for t in range(x.shape[1]):
        y = (inputs[:, t : t + width].double() * weight.double().T).sum(1)
        y = y if bias is None else y + bias.double()
        out.append(y * y.sigmoid() if activation == "silu" else y)
    return torch.stack(out, 1).to(dtype), inputs[:, x.shape[1] :]
