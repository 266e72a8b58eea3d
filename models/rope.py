"""Rotary position embedding (Su et al. 2021), rotating the halves of a head as Llama does."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Every layer turns by the same angles: they are made once for a tensor of positions and go with it.
_ANGLES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def rotate(x: Float[Tensor, "B T H K"], positions: Int[Tensor, " T"], base: float) -> Float[Tensor, "B T H K"]:
    """x with each pair (x_i, x_{i+K/2}) turned by position * base^(-2i/K); angles in fp32, result in x's dtype.

    `positions` must not be changed in place. Without gradients the two halves are written where they belong, rounded on
    the way: no fp32 copy of x is joined.
    """
    half = x.shape[-1] // 2
    cos, sin = _angles(positions, half, base)
    first, second = x[..., :half], x[..., half:]
    if not torch.is_grad_enabled() and x.dtype in (torch.bfloat16, torch.float16):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.sub(first * cos, second * sin, out=out[..., :half])
        torch.add(second * cos, first * sin, out=out[..., half:])
        return out
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _angles(positions: Tensor, half: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, 1, half] of every angle."""
    if torch.compiler.is_compiling():  # fused into what uses them
        return _cos_and_sin(positions, half, base)
    made = _ANGLES.setdefault(positions, {})
    if (half, base) not in made:
        made[half, base] = _cos_and_sin(positions, half, base)
    return made[half, base]


def _cos_and_sin(positions: Tensor, half: int, base: float) -> tuple[Tensor, Tensor]:
    frequencies = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
