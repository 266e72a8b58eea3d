"""One pre-norm block: x + mixer(norm(x)), then + mlp(norm(x)), with TransformerLens's residual-stream hook names.

Without an MLP (d_ffn = 0) there is no hook_resid_mid and no hook_mlp_out. What is added may carry a factor (muP);
hook_attn_out and hook_mlp_out are what is added.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers import build_mixer
from models.mlp import SwiGLU
from models.norm import RMSNorm


class Block(nn.Module):
    hook_resid_pre: HookPoint
    hook_attn_out: HookPoint
    hook_resid_mid: HookPoint
    hook_mlp_out: HookPoint
    hook_resid_post: HookPoint

    def __init__(self, config: HybridConfig, layer: int, impl: Impl):
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.rms_eps)
        self.attn = build_mixer(config, layer, impl)
        self.scale = config.residual_scale
        self.has_mlp = config.d_ffn > 0
        if self.has_mlp:
            self.ln2 = RMSNorm(config.d_model, config.rms_eps)
            self.mlp = SwiGLU(config.d_model, config.d_ffn)
        parts = ("resid_mid", "mlp_out") if self.has_mlp else ()
        for name in ("resid_pre", "attn_out", *parts, "resid_post"):
            setattr(self, f"hook_{name}", HookPoint())

    def _scaled(self, output: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return output if self.scale == 1 else self.scale * output

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], pasts: list[Past] | None = None
    ) -> Float[Tensor, "B T D"]:
        """`pasts`: one for each path of the layer, read and brought up to date; None without a cache."""
        x = self.hook_resid_pre(x)
        normed = self.ln1(x)
        mixed = self.attn(normed, positions) if pasts is None else self.attn(normed, positions, *pasts)
        x = x + self.hook_attn_out(self._scaled(mixed))
        if not self.has_mlp:
            return self.hook_resid_post(x)
        x = self.hook_resid_mid(x)
        return self.hook_resid_post(x + self.hook_mlp_out(self._scaled(self.mlp(self.ln2(x)))))
