"""What mixers of the gated delta rule share: its exact window, its states, and rows of its effective attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from kernels.gated_delta_rule import gated_delta_rule
from kernels.operands import Impl, RecurrentOutput
from models.cache import Past
from models.mixers.mixer import at_least_fp32, listened
from models.mixers.recurrent import RecurrentMixer

L2_EPS = 1e-6
WIDEST = 256
"""Value features that the Triton kernels take at a time."""


class DeltaRuleMixer(RecurrentMixer):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T with unit k (eq. 5)."""

    hook_q_pre_conv: HookPoint
    hook_k_pre_conv: HookPoint
    hook_v_pre_conv: HookPoint
    hook_beta: HookPoint

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("q_pre_conv", "k_pre_conv", "v_pre_conv", "beta"):
            setattr(self, f"hook_{name}", HookPoint())

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        query, key, beta, log_decay = (at_least_fp32(recorded[name]) for name in ("q", "k", "beta", "log_decay"))
        query, key = (l2_normalise(by_value_head(x, self.n_heads)) for x in (query, key))
        operation = partial(delta_rule, scale=query.shape[-1] ** -0.5, impl=self.impl)
        return self._value_rows(operation, positions, query, key=key, log_decay=log_decay, beta=beta)

    def states(self, positions: Int[Tensor, " P"], **recorded: Tensor) -> Float[Tensor, "B P H K V"]:
        key, value, beta, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "v", "beta", "log_decay"))
        key, operation = l2_normalise(by_value_head(key, self.n_heads)), partial(delta_rule, impl=self.impl)
        return self._states_at(operation, positions, key=key, value=value, beta=beta, log_decay=log_decay)

    def recur(self, query: Tensor, operands: dict[str, Any], past: Past | None = None) -> Float[Tensor, "B T H V"]:
        """Unit queries and operands (unit key, value, log_decay, beta) of every value head -> what they read."""
        scale = query.shape[-1] ** -0.5
        if listened(self.hook_ssm_state):
            self._refuse_windowed(past)
            state = self.hook_ssm_state(self._states(operands, past))
            return scale * torch.einsum("bthk,bthkv->bthv", query, state)
        return self.continued(partial(delta_rule, scale=scale, impl=self.impl), past, query, **operands)

    def _states(self, operands: dict[str, Any], past: Past | None) -> Float[Tensor, "B T H K V"]:
        """Every state, windowed or not: asking with the K unit queries returns the K rows of S_t (K times the cost)."""
        key = operands["key"]
        batch, time, heads, width = key.shape
        unit = torch.eye(width, device=key.device, dtype=key.dtype)
        repeated = {name: x.repeat_interleave(width, dim=2) for name, x in operands.items()}
        initial = None if past is None else past.kept.get("state")
        result = delta_rule(
            query=unit.repeat(heads, 1).expand(batch, time, -1, -1),
            window=self.state_window,
            impl=self.impl,
            initial_state=None if initial is None else initial.repeat_interleave(width, dim=1),
            **repeated,
        )
        if past is not None:
            past.kept["state"] = result.state[:, ::width]
        return rearrange(result.out, "B T (H K) V -> B T H K V", K=width)


def delta_rule(*, value: Tensor, initial_state: Tensor | None = None, **operands: Any) -> RecurrentOutput:
    """kernels.gated_delta_rule for values of any width: their features do not mix, so WIDEST at a time are computed."""
    starts = range(0, value.shape[-1], WIDEST)
    parts = [
        gated_delta_rule(
            value=value[..., start : start + WIDEST],
            initial_state=None if initial_state is None else initial_state[..., start : start + WIDEST],
            **operands,
        )
        for start in starts
    ]
    if len(parts) == 1:
        return parts[0]
    return RecurrentOutput(torch.cat([part.out for part in parts], -1), torch.cat([part.state for part in parts], -1))


def by_value_head(x: Float[Tensor, "B T G K"], n_heads: int) -> Float[Tensor, "B T H K"]:
    """Each key head repeated for the consecutive value heads that it serves."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6), in fp32: at zero vectors finite, value and gradient."""
    wide = at_least_fp32(x)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)
