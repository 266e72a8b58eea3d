"""Gated DeltaNet (Yang et al. 2025), Qwen3-Next's layer (eq. 5).

S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K), q and k L2-normalised
after a short causal convolution with SiLU; per-head RMSNorm of o, times silu(gate).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.gated_delta_rule import gated_delta_rule
from kernels.operands import Impl
from models.cache import Past
from models.config import HybridConfig
from models.mixers.mixer import at_least_fp32, listened
from models.mixers.recurrent import RecurrentMixer
from models.norm import RMSNorm

DT_RANGE = (1e-3, 0.1)
L2_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
    kind = "gdn"
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Linear
    hook_q_pre_conv: HookPoint
    hook_k_pre_conv: HookPoint
    hook_v_pre_conv: HookPoint
    hook_beta: HookPoint

    def __init__(self, config: HybridConfig, n_heads: int, n_kv_heads: int, layer: int, impl: Impl):
        super().__init__(n_heads, n_heads, impl)
        inner = n_heads * config.d_head
        self.conv_width = config.conv_width
        self.beta_scale = config.gdn_beta_scale
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, nn.Linear(config.d_model, inner, bias=False))
        self.a_proj = nn.Linear(config.d_model, n_heads, bias=False)
        self.b_proj = nn.Linear(config.d_model, n_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(3 * inner, config.conv_width))  # channels of q, k, v
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.norm = RMSNorm(config.d_head, config.rms_eps)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        for name in ("q_pre_conv", "k_pre_conv", "v_pre_conv", "beta"):
            setattr(self, f"hook_{name}", HookPoint())

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        super().reset_parameters(std, out_std)
        bound = self.conv_weight.shape[1] ** -0.5
        self.conv_weight.uniform_(-bound, bound)
        self.A_log.uniform_(1.0, 16.0).log_()
        low, high = map(math.log, DT_RANGE)
        dt = torch.empty(self.n_heads).uniform_(low, high).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        query, key, beta, log_decay = (at_least_fp32(recorded[name]) for name in ("q", "k", "beta", "log_decay"))
        operation = partial(gated_delta_rule, scale=query.shape[-1] ** -0.5, impl=self.impl)
        operands = {"key": _l2_normalise(key), "log_decay": log_decay, "beta": beta}
        return self._value_rows(operation, positions, _l2_normalise(query), **operands)

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, " T"], past: Past | None = None
    ) -> Float[Tensor, "B T D"]:
        before = (self.hook_q_pre_conv(self.q_proj(x)), self.hook_k_pre_conv(self.k_proj(x)),
                  self.hook_v_pre_conv(self.v_proj(x)))  # fmt: skip
        mixed = self.convolved(past, x=torch.cat(before, dim=-1), weight=self.conv_weight, activation="silu")
        query, key, value = rearrange(mixed, "B T (three H K) -> three B T H K", three=3, H=self.n_heads)
        query, key, value = self.hook_q(query), self.hook_k(key), self.hook_v(value)
        beta = self.hook_beta(self.beta_scale * torch.sigmoid(self.b_proj(x)))
        step = F.softplus(at_least_fp32(self.a_proj(x)) + at_least_fp32(self.dt_bias))
        log_decay = self.hook_log_decay(-at_least_fp32(self.A_log).exp() * step)
        operands = {"key": _l2_normalise(key), "value": value, "log_decay": log_decay, "beta": beta}
        out = self.hook_recurrence_out(self._recur(_l2_normalise(query), operands, past))
        gate = self.hook_gate_input(rearrange(self.g_proj(x), "B T (H V) -> B T H V", H=self.n_heads))
        z = self.hook_z(self.norm(out) * F.silu(gate))
        return self.o_proj(rearrange(z, "B T H V -> B T (H V)"))

    def _recur(self, query: Tensor, operands: dict[str, Any], past: Past | None) -> Float[Tensor, "B T H V"]:
        scale = query.shape[-1] ** -0.5
        if listened(self.hook_ssm_state):
            self._refuse_windowed(past)
            state = self.hook_ssm_state(self._states(operands, past))
            return scale * torch.einsum("bthk,bthkv->bthv", query, state)
        return self.continued(partial(gated_delta_rule, scale=scale, impl=self.impl), past, query, **operands)

    def _states(self, operands: dict[str, Any], past: Past | None) -> Float[Tensor, "B T H K V"]:
        """Every state, windowed or not: asking with the K unit queries returns the K rows of S_t (K times the cost)."""
        key = operands["key"]
        batch, time, heads, width = key.shape
        unit = torch.eye(width, device=key.device, dtype=key.dtype)
        repeated = {name: x.repeat_interleave(width, dim=2) for name, x in operands.items()}
        initial = None if past is None else past.kept.get("state")
        result = gated_delta_rule(
            query=unit.repeat(heads, 1).expand(batch, time, -1, -1),
            window=self.state_window,
            impl=self.impl,
            initial_state=None if initial is None else initial.repeat_interleave(width, dim=1),
            **repeated,
        )
        if past is not None:
            past.kept["state"] = result.state[:, ::width]
        return rearrange(result.out, "B T (H K) V -> B T H K V", K=width)


def _l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6), in fp32: at zero vectors finite, value and gradient."""
    wide = at_least_fp32(x)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)
