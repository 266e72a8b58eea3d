"""What the recurrent mixers share: one state per head, o_t = scale * S_t^T q_t, with an exact window on the state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.linear_decay import linear_decay
from kernels.operands import Impl, RecurrentOutput
from kernels.short_conv import short_conv
from models.cache import Past
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

    def convolved(self, past: Past | None, **operands: Any) -> Tensor:
        """short_conv over what the past still holds and these inputs."""
        result = short_conv(initial=None if past is None else past.kept.get("conv"), impl=self.impl, **operands)
        if past is not None:
            past.kept["conv"] = result.tail
        return result.out

    def continued(
        self, operation: Callable[..., RecurrentOutput], past: Past | None, query: Tensor, **operands: Tensor
    ) -> Float[Tensor, "B T H V"]:
        """operation(query, **operands).out from the past on, which is brought up to date."""
        window = self.state_window
        if past is None:
            return operation(query=query, window=window, **operands).out
        if window is None:
            result = operation(query=query, initial_state=past.kept.get("state"), **operands)
            past.kept["state"] = result.state
            return result.out
        tokens = {
            name: past.append(name, operand, window - 1) if operand.ndim > 1 else operand
            for name, operand in operands.items()
        }
        before = tokens["key"].shape[1] - query.shape[1]  # no output is wanted at the remembered tokens
        query = F.pad(query, (0, 0, 0, 0, before, 0))
        return operation(query=query, window=window, **tokens).out[:, before:]

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        """W with hook_recurrence_out_t = sum over j of W_tj hook_v_j, for t in positions, under the window in force.

        `recorded` are this layer's hook tensors, named without "hook_". Exact: a recurrence is linear in its values, so
        a row is the gradient of what position t reads with respect to them, one backward of O(T K) each.
        """
        raise NotImplementedError

    def states(self, positions: Int[Tensor, " P"], **recorded: Tensor) -> Float[Tensor, "B P H K V"]:
        """S_t at ascending positions, of which only these are ever held: one sweep of O(T) over the operands.

        `recorded` are hook_k, hook_v, hook_log_decay and, where there is one, hook_beta, named without "hook_".
        ValueError under a restriction, whose states are made of other tokens.
        """
        raise NotImplementedError

    def _states_at(
        self, operation: Callable[..., RecurrentOutput], positions: Tensor, **operands: Tensor
    ) -> Float[Tensor, "B P H K V"]:
        if self.state_window is not None:
            raise ValueError(
                f"states of a {self.kind} layer restricted to {self.state_window} tokens; expected none in force."
            )
        found: list[Tensor] = []
        first = 0
        for stop in (positions + 1).tolist():
            part = {name: x[:, first:stop] if x.ndim > 1 else x for name, x in operands.items()}
            result = operation(query=part["key"], initial_state=found[-1] if found else None, **part)
            found.append(result.state)
            first = stop
        return torch.stack(found, 1)

    def _value_rows(
        self, operation: Callable[..., RecurrentOutput], positions: Tensor, query: Tensor, **operands: Tensor
    ) -> Float[Tensor, "B H R T"]:
        with torch.enable_grad():
            value = query.new_zeros(*query.shape[:3], 1, requires_grad=True)
            read = operation(query=query, value=value, window=self.state_window, **operands).out
            rows = [torch.autograd.grad(read[:, t].sum(), value, retain_graph=True)[0] for t in positions.tolist()]
        return torch.stack(rows, 1).squeeze(-1).permute(0, 3, 1, 2)

    @property
    def state_window(self) -> int | None:
        """Tokens the state may be made from; nested restrictions intersect. None: unrestricted."""
        # min(..., default=None) would break the graph of a compiled block
        return min([r.window for r in self.restrictions]) if self.restrictions else None

    def _refuse_windowed(self, past: Past | None) -> None:
        if past is not None and self.state_window is not None:
            raise ValueError(
                f"hook_ssm_state or hook_ssm_write of a {self.kind} layer is listened to while the layer is restricted "
                f"to {self.state_window} tokens and continues a cache; expected at most two of the three, because a "
                "windowed cache holds no state. Pass the whole sequence without a cache."
            )


class ScalarDecayMixer(RecurrentMixer):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T (eq. 3, 4): Lightning (g fixed per head) and Mamba-2 (g per token)."""

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        self.hook_ssm_write = HookPoint()

    def recur(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, past: Past | None = None
    ) -> Float[Tensor, "B T H V"]:
        operation = partial(linear_decay, impl=self.impl)
        if not (listened(self.hook_ssm_write) or listened(self.hook_ssm_state)):
            return self.continued(operation, past, query, key=key, value=value, log_decay=log_decay)
        self._refuse_windowed(past)
        write = self.hook_ssm_write(torch.einsum("bthk,bthv->bthkv", key, value))
        # Every row of a state is a head of its own with key = query = 1: the operation returns the states, so an edited
        # write propagates to all later ones.
        width = write.shape[-2]
        rows = write.flatten(2, 3)
        one = torch.ones_like(rows[..., :1])
        initial = None if past is None or "state" not in past.kept else past.kept["state"].flatten(1, 2).unsqueeze(2)
        result = operation(
            query=one, key=one, value=rows, log_decay=log_decay.repeat_interleave(width, -1), initial_state=initial,
            window=self.state_window,
        )  # fmt: skip
        if past is not None:
            past.kept["state"] = result.state.squeeze(2).unflatten(1, (-1, width))
        state = self.hook_ssm_state(result.out.unflatten(2, (-1, width)))
        return torch.einsum("bthk,bthkv->bthv", query, state)
