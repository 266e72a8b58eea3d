"""Mamba-2 (Dao & Gu 2024), the layer of Hugging Face's Mamba2Mixer with one group (eq. 4).

S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T, y_t = S_t^T C_t + D x_t; a short causal convolution with SiLU before it,
RMSNorm of y * silu(z) behind it. In the field's common names: query = C, key = B, value = x, beta = dt.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.linear_decay import linear_decay
from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers.mixer import at_least_fp32
from models.mixers.recurrent import ScalarDecayMixer
from models.norm import RMSNorm

DT_RANGE = (1e-3, 0.1)  # of the reference initialisation


class Mamba2(ScalarDecayMixer):
    """expand * D inner features in heads of d_head, whatever the model's number of attention heads."""

    kind = "mamba2"
    hook_q_pre_conv: HookPoint
    hook_k_pre_conv: HookPoint
    hook_v_pre_conv: HookPoint
    hook_beta: HookPoint

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        inner = config.mamba2_expand * config.d_model * n_heads // config.n_heads  # a half of it when head-wise
        if inner % config.d_head:
            raise ValueError(f"Mamba-2's inner width {inner} is no multiple of d_head = {config.d_head}.")
        super().__init__(inner // config.d_head, 1, impl)
        self.conv_width = config.conv_width
        self.inner, self.state = inner, config.mamba2_state
        conv_channels = inner + 2 * self.state
        self.in_proj = nn.Linear(config.d_model, inner + conv_channels + self.n_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(conv_channels, config.conv_width))
        self.conv_bias = nn.Parameter(torch.zeros(conv_channels))
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = RMSNorm(inner, config.rms_eps)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        for name in ("q_pre_conv", "k_pre_conv", "v_pre_conv", "beta"):
            setattr(self, f"hook_{name}", HookPoint())

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        super().reset_parameters(std, out_std)
        bound = self.conv_weight.shape[1] ** -0.5  # PyTorch's default for a depthwise convolution
        self.conv_weight.uniform_(-bound, bound)
        self.A_log.copy_(torch.arange(1, self.n_heads + 1).log())
        low, high = map(math.log, DT_RANGE)
        dt = torch.empty(self.n_heads).uniform_(low, high).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        key, query, dt, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "q", "beta", "log_decay"))
        share = (-1, -1, self.n_heads, -1)
        rows = self._value_rows(
            partial(linear_decay, impl=self.impl),
            positions,
            query.expand(share),
            key=key.expand(share),
            log_decay=log_decay,
        )
        rows = rows * dt.permute(0, 2, 1)[:, :, None]
        at = positions.to(rows.device)
        rows[:, :, torch.arange(len(at), device=rows.device), at] += at_least_fp32(self.D)[:, None]  # the skip D x_t
        return rows

    def states(self, positions: Int[Tensor, " P"], **recorded: Tensor) -> Float[Tensor, "B P H K V"]:
        key, value, dt, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "v", "beta", "log_decay"))
        operation, key = partial(linear_decay, impl=self.impl), key.expand(-1, -1, self.n_heads, -1)
        return self._states_at(operation, positions, key=key, value=value * dt[..., None], log_decay=log_decay)

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        gate, inputs, key, query, dt = self.in_proj(x).split(
            (self.inner, self.inner, self.state, self.state, self.n_heads), dim=-1
        )
        before = (self.hook_v_pre_conv(inputs), self.hook_k_pre_conv(key), self.hook_q_pre_conv(query))
        mixed = self.convolved(
            past, x=torch.cat(before, dim=-1), weight=self.conv_weight, bias=self.conv_bias, activation="silu"
        )
        value, key, query = mixed.split((self.inner, self.state, self.state), dim=-1)
        value = self.hook_v(rearrange(value, "B T (H V) -> B T H V", H=self.n_heads))
        key, query = self.hook_k(key[:, :, None]), self.hook_q(query[:, :, None])  # one group serves all heads
        dt = self.hook_beta(F.softplus(at_least_fp32(dt) + at_least_fp32(self.dt_bias)))
        log_decay = self.hook_log_decay(-at_least_fp32(self.A_log).exp() * dt)
        share = (-1, -1, self.n_heads, -1)
        written = value * dt[..., None].to(value.dtype)
        out = self.recur(query.expand(share), key.expand(share), written, log_decay, past)
        out = self.hook_recurrence_out(out + self.D[:, None].to(value.dtype) * value)
        gate = self.hook_gate_input(gate)
        normed = self.norm(rearrange(out, "B T H V -> B T (H V)") * F.silu(gate))
        z = self.hook_z(rearrange(normed, "B T (H V) -> B T H V", H=self.n_heads))
        return self.o_proj(rearrange(z, "B T H V -> B T (H V)"))
