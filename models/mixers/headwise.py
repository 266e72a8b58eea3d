"""Head-wise mixing: half of a layer's heads attend in full, the other half is the efficient mixer; outputs add."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.cache import Past
from models.mixers.mixer import Mixer


class HeadwiseMixer(nn.Module):
    """Hook names carry the path: blocks.N.attn.full.hook_q, blocks.N.attn.efficient.hook_q."""

    kind = "headwise"

    def __init__(self, full: Mixer, efficient: Mixer):
        super().__init__()
        self.full = full
        self.efficient = efficient

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        positions: Int[Tensor, " T"],
        full_past: Past | None = None,
        efficient_past: Past | None = None,
    ) -> Float[Tensor, "B T D"]:
        return self.full(x, positions, full_past) + self.efficient(x, positions, efficient_past)

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        self.full.reset_parameters(std, out_std)
        self.efficient.reset_parameters(std, out_std)
