"""Softmax attention to the w most recent keys, s in [t - w + 1, t] (eq. 2), plus optional sink tokens."""

from __future__ import annotations

from kernels.attention import Band
from kernels.operands import Impl
from models.config import HybridConfig
from models.mixers.attention import FullAttention


class SlidingWindowAttention(FullAttention):
    kind = "swa"

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        super().__init__(config, n_heads, n_kv_heads, layer, impl)
        self.window = config.window
        self.sinks = config.sinks

    @staticmethod
    def _rotates(config: HybridConfig) -> bool:
        return True  # NoPE variants keep rotary positions inside the window

    def bands(self) -> tuple[Band, ...]:
        return (Band(window=self.window, sinks=self.sinks), *super().bands())
