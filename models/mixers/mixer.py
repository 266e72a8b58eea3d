"""What every token mixer shares: its kind, its heads, its restrictions, and knowing whether somebody listens."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.knockout import Knockout
from hooks.restriction import Restriction
from kernels.operands import Impl
from models.cache import Past
from models.listeners import listened as listened


class Mixer(nn.Module):
    """A map [B, T, D] -> [B, T, D] along time. Hooks edit `restrictions` and `knockouts`, and nothing else does."""

    kind: str
    window: int | None = None
    conv_width: int = 1
    """Taps of a convolution before the state; it widens the reach by conv_width - 1 tokens."""

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.impl = impl
        self.restrictions: tuple[Restriction, ...] = ()
        self.knockouts: tuple[Knockout, ...] = ()

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; the projections that write into the residual stream get `out_std`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, out_std if name == "o_proj.weight" else std)


def at_least_fp32(x: Tensor) -> Tensor:
    """bf16 and fp16 become fp32, where decays and norms lose too much; fp32 and fp64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
