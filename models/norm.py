"""RMSNorm with TransformerLens's hook points: y = w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from models.listeners import listened


class RMSNorm(nn.Module):
    """Statistics in fp32 whatever the input; hook_normalized is x / scale, before the weight, as in TransformerLens.

    In bf16 and fp16 hook_scale is computed only while somebody listens to it or edits it: torch's fused form, which
    saves five passes over x in fp32, differs by fp32 rounding before the result is rounded.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        half = x.dtype in (torch.bfloat16, torch.float16)
        if half and not listened(self.hook_scale):
            return self.weight * self.hook_normalized(F.rms_norm(x, x.shape[-1:], eps=self.eps))
        wide = x.float() if half else x
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.weight * self.hook_normalized((wide / scale).to(x.dtype))
