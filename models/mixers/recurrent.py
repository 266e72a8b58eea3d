"""What the recurrent mixers share: one state per head, o_t = scale * S_t^T q_t, with an exact window on the state."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from kernels.linear_decay import linear_decay
from kernels.operands import Impl
from models.mixers.mixer import Mixer, listened


class RecurrentMixer(Mixer):
    """Base of Lightning, Mamba-2 and Gated DeltaNet. hook_ssm_state [B, T, H, K, V] is made only when listened to."""

    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_log_decay: HookPoint
    hook_ssm_state: HookPoint
    hook_recurrence_out: HookPoint
    hook_gate_input: HookPoint
    hook_z: HookPoint

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("q", "k", "v", "log_decay", "ssm_state", "recurrence_out", "gate_input", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @property
    def state_window(self) -> int | None:
        """Tokens the state may be made from; nested restrictions intersect. None: unrestricted."""
        # min(..., default=None) would break the graph of a compiled block
        return min([r.window for r in self.restrictions]) if self.restrictions else None


class ScalarDecayMixer(RecurrentMixer):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T (eq. 3, 4): Lightning (g fixed per head) and Mamba-2 (g per token)."""

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        self.hook_ssm_write = HookPoint()

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Float[Tensor, "B T H V"]:
        window = self.state_window
        if not (listened(self.hook_ssm_write) or listened(self.hook_ssm_state)):
            return linear_decay(
                query=query, key=key, value=value, log_decay=log_decay, window=window, impl=self.impl
            ).out
        write = self.hook_ssm_write(torch.einsum("bthk,bthv->bthkv", key, value))
        # With key = query = 1 the operation returns its state, so an edited write propagates to every later state.
        one = torch.ones_like(write[..., :1, 0])
        state = linear_decay(
            query=one, key=one, value=write.flatten(-2), log_decay=log_decay, window=window, impl=self.impl
        ).out.unflatten(-1, write.shape[-2:])
        return torch.einsum("bthk,bthkv->bthv", query, self.hook_ssm_state(state))
