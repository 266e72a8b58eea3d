"""Rotary position embedding (Su et al. 2021), rotating the halves of a head as Llama does."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(x: Float[Tensor, "B T H K"], positions: Int[Tensor, " T"], base: float) -> Float[Tensor, "B T H K"]:
    """x with each pair (x_i, x_{i+K/2}) turned by position * base^(-2i/K); angles in fp32, result in x's dtype.

    Without gradients the two halves are written where they belong, rounded on the way: no fp32 copy of x is joined.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
    first, second = x[..., :half], x[..., half:]
    if not torch.is_grad_enabled() and x.dtype in (torch.bfloat16, torch.float16):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.sub(first * cos, second * sin, out=out[..., :half])
        torch.add(second * cos, first * sin, out=out[..., half:])
        return out
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
