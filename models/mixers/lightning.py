"""Lightning attention, MiniMax's layer: S_t = gamma_h S_{t-1} + k_t v_t^T with a fixed decay per head (eq. 3).

q, k, v pass through SiLU; the output is RMS-normalised over all heads, gated by a sigmoid and projected. No positions.
HypeNet's layer (arXiv:2601.22156) has instead of SiLU an RMSNorm of every query and key head, rotary positions, and
reads S_t^T q_t / sqrt(K).
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.linear_decay import linear_decay
from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers.mixer import at_least_fp32
from models.mixers.recurrent import ScalarDecayMixer
from models.norm import RMSNorm
from models.rope import rotate


def log_decays(convention: str, n_heads: int, layer: int, n_layers: int) -> Float[Tensor, " H"]:
    """log gamma_h in nats per token, float32, under a named public convention.

    alibi            -2^(-8(h+1)/H), no layer factor (default)
    alibi-from-zero  -2^(-8h/H)
    alibi-interleaved  alibi where H is a power of two; else the slopes of the next lower power P, then every other one
                     of those of 2P (Press et al. 2022's code, fla's, HypeNet's)
    minimax          alibi times the layer factor 1 - l/(L-1+1e-5) + 1e-5
    transnormer      -(8/H)(1 - l/L) h; head 0 never decays
    """
    head = torch.arange(n_heads, dtype=torch.float64)
    alibi = -(2.0 ** (-8 * (head + 1) / n_heads))
    if convention == "alibi":
        slopes = alibi
    elif convention == "alibi-interleaved":
        lower = 2 ** (n_heads.bit_length() - 1)
        slopes = -(2.0 ** (-8 * torch.cat([head[:lower] + 1, (head[: n_heads - lower] + 0.5)]) / lower))
    elif convention == "alibi-from-zero":
        slopes = -(2.0 ** (-8 * head / n_heads))
    elif convention == "minimax":
        slopes = alibi * (1 - layer / (n_layers - 1 + 1e-5) + 1e-5)
    elif convention == "transnormer":
        slopes = -(8 / n_heads) * (1 - layer / n_layers) * head
    else:
        raise ValueError(f"lightning slopes {convention!r} are unknown; see models.config.LIGHTNING_SLOPES.")
    return slopes.float()


class Lightning(ScalarDecayMixer):
    kind = "lightning"
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Linear
    log_decay: Tensor

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        super().__init__(n_heads, n_heads, impl)  # MiniMax's layer has no grouped kv heads
        inner = n_heads * config.key_width
        self.silu, self.scale = config.lightning_silu, config.lightning_scale
        self.rope_base = config.rope_base if config.lightning_rope else None
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, nn.Linear(config.d_model, inner, bias=False))
        self.q_norm, self.k_norm = (
            RMSNorm(config.key_width, config.rms_eps) if config.lightning_qk_norm else nn.Identity() for _ in "qk"
        )
        self.norm = RMSNorm(inner, config.rms_eps)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        decays = log_decays(config.lightning_slopes, n_heads, layer, config.n_layers)
        self.register_buffer("log_decay", decays, persistent=False)  # follows from the config

    def _heads(self, projected: Tensor) -> Float[Tensor, "B T H K"]:
        activated = F.silu(projected) if self.silu else projected
        return rearrange(activated, "B T (H K) -> B T H K", H=self.n_heads)

    def _placed(self, x: Float[Tensor, "B T H K"], positions: Int[Tensor, " T"]) -> Float[Tensor, "B T H K"]:
        return x if self.rope_base is None else rotate(x, positions, self.rope_base)

    def _scaled(self, query: Tensor) -> Tensor:
        return query if self.scale == 1 else self.scale * query

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        query, key, log_decay = (at_least_fp32(recorded[name]) for name in ("q", "k", "log_decay"))
        operation = partial(linear_decay, impl=self.impl)
        return self._value_rows(operation, positions, self._scaled(query), key=key, log_decay=log_decay)

    def states(self, positions: Int[Tensor, " P"], **recorded: Tensor) -> Float[Tensor, "B P H K V"]:
        key, value, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "v", "log_decay"))
        operation = partial(linear_decay, impl=self.impl)
        return self._states_at(operation, positions, key=key, value=value, log_decay=log_decay)

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        query = self.hook_q(self._placed(self.q_norm(self._heads(self.q_proj(x))), positions))
        key = self.hook_k(self._placed(self.k_norm(self._heads(self.k_proj(x))), positions))
        value = self.hook_v(self._heads(self.v_proj(x)))
        decay = self.hook_log_decay(at_least_fp32(self.log_decay))
        out = self.hook_recurrence_out(self.recur(self._scaled(query), key, value, decay, past))
        gate = self.hook_gate_input(self.g_proj(x))
        gated = torch.sigmoid(gate) * self.norm(rearrange(out, "B T H V -> B T (H V)"))
        z = self.hook_z(rearrange(gated, "B T (H V) -> B T H V", H=self.n_heads))
        return self.o_proj(rearrange(z, "B T H V -> B T (H V)"))
