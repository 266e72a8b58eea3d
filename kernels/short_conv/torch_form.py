"""short_conv as W shifted products: one fused kernel under torch.compile, and no transposed copies for conv1d."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import working_dtype


def short_conv_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    work, width, tokens = working_dtype(x, weight, bias, initial), weight.shape[1], x.shape[1]
    inputs = F.pad(x, (0, 0, width - 1, 0)) if initial is None else torch.cat([initial.to(x.dtype), x], 1)
    taps = weight.to(work).unbind(1)
    out = inputs[:, width - 1 :].to(work) * taps[-1]
    for i, tap in enumerate(taps[:-1]):
        out = out + inputs[:, i : i + tokens].to(work) * tap
    if bias is not None:
        out = out + bias.to(work)
    if activation == "silu":
        out = F.silu(out)
    return out.to(x.dtype), inputs[:, tokens:]
