"""Gated DeltaNet (Yang et al. 2025), Qwen3-Next's layer (eq. 5).

S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K), q and k L2-normalised
after a short causal convolution with SiLU; per-head RMSNorm of o, times silu(gate). A key head may serve several
consecutive value heads, and V may differ from K.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers.delta_rule import DeltaRuleMixer, by_value_head, l2_normalise
from models.mixers.mixer import at_least_fp32
from models.norm import RMSNorm

DT_RANGE = (1e-3, 0.1)


class GatedDeltaNet(DeltaRuleMixer):
    kind = "gdn"
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Linear

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        share = config.value_heads // config.key_heads
        super().__init__(n_heads * share, n_heads, impl)
        inner, values = n_heads * config.key_width, self.n_heads * config.value_width
        self.widths = (inner, inner, values)
        self.conv_width = config.conv_width
        self.beta_scale = config.gdn_beta_scale
        for name, width in zip(("q_proj", "k_proj", "v_proj", "g_proj"), (*self.widths, values), strict=True):
            setattr(self, name, nn.Linear(config.d_model, width, bias=False))
        self.a_proj = nn.Linear(config.d_model, self.n_heads, bias=False)
        self.b_proj = nn.Linear(config.d_model, self.n_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), config.conv_width))  # channels of q, k, v
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.norm = RMSNorm(config.value_width, config.rms_eps)
        self.o_proj = nn.Linear(values, config.d_model, bias=False)

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        super().reset_parameters(std, out_std)
        bound = self.conv_weight.shape[1] ** -0.5
        self.conv_weight.uniform_(-bound, bound)
        self.A_log.uniform_(1.0, 16.0).log_()
        low, high = map(math.log, DT_RANGE)
        dt = torch.empty(self.n_heads).uniform_(low, high).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        before = (self.hook_q_pre_conv(self.q_proj(x)), self.hook_k_pre_conv(self.k_proj(x)),
                  self.hook_v_pre_conv(self.v_proj(x)))  # fmt: skip
        mixed = self.convolved(past, x=torch.cat(before, dim=-1), weight=self.conv_weight, activation="silu")
        query, key, value = mixed.split(self.widths, dim=-1)
        query = self.hook_q(rearrange(query, "B T (G K) -> B T G K", G=self.n_kv_heads))
        key = self.hook_k(rearrange(key, "B T (G K) -> B T G K", G=self.n_kv_heads))
        value = self.hook_v(rearrange(value, "B T (H V) -> B T H V", H=self.n_heads))
        beta = self.hook_beta(self.beta_scale * torch.sigmoid(self.b_proj(x)))
        step = F.softplus(at_least_fp32(self.a_proj(x)) + at_least_fp32(self.dt_bias))
        log_decay = self.hook_log_decay(-at_least_fp32(self.A_log).exp() * step)
        query, key = (by_value_head(l2_normalise(x), self.n_heads) for x in (query, key))
        operands = {"key": key, "value": value, "log_decay": log_decay, "beta": beta}
        out = self.hook_recurrence_out(self.recur(query, operands, past))
        gate = self.hook_gate_input(rearrange(self.g_proj(x), "B T (H V) -> B T H V", H=self.n_heads))
        z = self.hook_z(self.norm(out) * F.silu(gate))
        return self.o_proj(rearrange(z, "B T H V -> B T (H V)"))
