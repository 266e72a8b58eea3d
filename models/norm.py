"""RMSNorm with TransformerLens's hook points: y = w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from models.listeners import listened

HALF = (torch.bfloat16, torch.float16)


class RMSNorm(nn.Module):
    """Statistics in fp32 whatever the input; hook_normalized is x / scale, before the weight, as in TransformerLens.

    The result is in 16 bits if the input or the weight is: the residual stream is wider than weights of 16 bits. There
    hook_scale is computed only while somebody listens to it or edits it: torch's fused form, which saves five passes
    over x in fp32, differs by fp32 rounding before the result is rounded.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        dtype = next((dtype for dtype in (x.dtype, self.weight.dtype) if dtype in HALF), x.dtype)
        if dtype in HALF and not listened(self.hook_scale):
            return self.weight * self.hook_normalized(F.rms_norm(x, x.shape[-1:], eps=self.eps).to(dtype))
        wide = x.float() if dtype in HALF else x
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.weight * self.hook_normalized((wide / scale).to(dtype))
