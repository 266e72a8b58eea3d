"""Softmax attention with grouped kv heads (eq. 1): o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s, rotary or NoPE.

Released checkpoints may have an RMSNorm of every query and key head (hook_q and hook_k lie behind it), biases, learned
sink logits, and a sigmoid gate of the output (hook_z lies behind it).
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.attention import Band, attention, attention_pattern
from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers.mixer import Mixer, listened
from models.norm import RMSNorm
from models.rope import rotate
from models.softmax_rows import out_without, pattern_without


class FullAttention(Mixer):
    """Every key s <= t is visible."""

    kind = "full"
    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_rot_q: HookPoint
    hook_rot_k: HookPoint
    hook_pattern: HookPoint
    hook_z: HookPoint
    hook_gate_input: HookPoint

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        self.d_head = config.d_head
        self.rope_base = config.rope_base if self._rotates(config) else None
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.d_model, n_heads * config.d_head, bias=bias)
        self.k_proj = nn.Linear(config.d_model, n_kv_heads * config.d_head, bias=bias)
        self.v_proj = nn.Linear(config.d_model, n_kv_heads * config.d_head, bias=bias)
        self.o_proj = nn.Linear(n_heads * config.d_head, config.d_model, bias=False)
        eps = config.qk_norm_eps
        self.q_norm, self.k_norm = (nn.Identity() if eps is None else RMSNorm(config.d_head, eps) for _ in "qk")
        self.sink_logits = nn.Parameter(torch.zeros(n_heads)) if self.kind in config.learned_sinks else None
        names = ["q", "k", "v", "pattern", "z"]
        if self.rope_base is not None:  # a point that never fires would be an error to listen to
            names += ["rot_q", "rot_k"]
        if config.attention_gate:
            self.g_proj = nn.Linear(config.d_model, n_heads * config.d_head, bias=False)
            names.append("gate_input")
        for name in names:
            setattr(self, f"hook_{name}", HookPoint())

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        super().reset_parameters(std, out_std)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            if projection.bias is not None:
                projection.bias.zero_()

    @staticmethod
    def _rotates(config: HybridConfig) -> bool:
        return config.rope_on_full

    def bands(self) -> tuple[Band, ...]:
        """Which keys are visible: the layer's own window and every restriction in force, intersected."""
        return tuple(Band(window=r.window, sinks=r.sinks) for r in self.restrictions)

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        query = self.hook_q(self.q_norm(rearrange(self.q_proj(x), "B T (H K) -> B T H K", K=self.d_head)))
        key = self.hook_k(self.k_norm(rearrange(self.k_proj(x), "B T (G K) -> B T G K", K=self.d_head)))
        value = self.hook_v(rearrange(self.v_proj(x), "B T (G V) -> B T G V", V=self.d_head))
        if self.rope_base is not None:
            query = self.hook_rot_q(rotate(query, positions, self.rope_base))
            key = self.hook_rot_k(rotate(key, positions, self.rope_base))
        hidden = 0
        if past is not None:
            if self.knockouts:
                raise ValueError("a cache is given under a knockout; expected whole sequences without a cache.")
            keep, seen = self._needed(), past.length + key.shape[1]
            key, value = past.append("key", key, keep), past.append("value", value, keep)
            hidden = seen - key.shape[1]
        z = self.hook_z(self._gated(self._attend(query, key, value, hidden), x))
        return self.o_proj(rearrange(z, "B T H V -> B T (H V)"))

    def _gated(self, heads: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        if not hasattr(self, "g_proj"):
            return heads
        gate = self.hook_gate_input(rearrange(self.g_proj(x), "B T (H V) -> B T H V", V=self.d_head))
        return heads * torch.sigmoid(gate)

    def _needed(self) -> int | None:
        """Keys that later queries can still see; None for all of them (sink tokens need absolute positions)."""
        bands = self.bands()
        windows = [band.window for band in bands if band.window is not None]
        return min(windows) - 1 if windows and not any(band.sinks for band in bands) else None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: int = 0) -> Float[Tensor, "B T H V"]:
        """`hidden`: keys before the first given one that no query can see; their columns of the pattern are zero."""
        operands: dict[str, Any] = {
            "query": query, "key": key, "value": value, "bands": self.bands(), "sink_logits": self.sink_logits,
            "impl": self.impl,
        }  # fmt: skip
        seen = {"bands": self.bands(), "scale": query.shape[-1] ** -0.5, "sink_logits": self.sink_logits}
        if not listened(self.hook_pattern):
            out = attention(**operands)
            return out_without(out, value, self.knockouts, query, key, **seen) if self.knockouts else out
        pattern = attention_pattern(**operands)
        pattern = pattern_without(pattern, self.knockouts, query, key, **seen) if self.knockouts else pattern
        pattern = self.hook_pattern(F.pad(pattern, (hidden, 0)))[..., hidden:]
        value = repeat(value, "B S G V -> B S (G share) V", share=self.n_heads // self.n_kv_heads)
        return torch.einsum("bhts,bshv->bthv", pattern.to(value.dtype), value)
