"""RMSNorm with TransformerLens's hook points: y = w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint


class RMSNorm(nn.Module):
    """Statistics in fp32 whatever the input; hook_normalized is x / scale, before the weight, as in TransformerLens."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.weight * self.hook_normalized((wide / scale).to(x.dtype))
