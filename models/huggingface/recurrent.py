"""Recurrent layers of Hugging Face models: hook points inside, and exact windows where the state is made.

Unrestricted, and with nobody editing decays, the family's own function computes; what it is given and what it returns
pass the hook points. A restriction, and the points that only our kernels have (hook_ssm_state, hook_ssm_write), make
kernels.gated_delta_rule or kernels.linear_decay compute instead.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.linear_decay import linear_decay
from kernels.operands import Impl
from models.mixers.delta_rule import DeltaRuleMixer, by_value_head, l2_normalise
from models.mixers.mixer import Mixer, at_least_fp32, listened
from models.mixers.recurrent import ScalarDecayMixer


class Bound(Mixer):
    """What the adapters of recurrent mixers share: the family's module behind them, and when they act."""

    layer: int
    replaced: ClassVar[Mapping[str, str]] = {}
    """Name of a function in the family's file -> method here that takes its place."""

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        """Whether this module, of the modeling file `home`, is a mixer of this mechanism."""
        raise NotImplementedError

    @classmethod
    def site_in(cls, block: nn.Module) -> nn.Module | None:
        """The module of a block that works by this mechanism; None if there is none."""
        return next((m for m in block.modules() if cls.matches(m, sys.modules[type(m).__module__])), None)

    def bind(self, site: nn.Module) -> None:
        """`site` is the family's module; it stays a child of the family's model only."""
        self.__dict__["site"] = site
        self.conv_width = int(getattr(site, "conv_kernel_size", 1))
        self.padding: Tensor | None = None
        self.shape: tuple[int, ...] = ()
        gated = next((c for c in site.children() if "gate" in inspect.signature(type(c).forward).parameters), None)
        if gated is not None:
            gated.register_forward_pre_hook(self._gate)
        elif hasattr(self, "hook_gate_input"):
            del self.hook_gate_input

    def _gate(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """hook_gate_input [B, T, H, V] on the way into the gated norm."""
        point = getattr(self, "hook_gate_input", None)
        if point is None or not listened(point) or len(args) < 2:
            return None
        gate = args[1]
        return (args[0], point(gate.reshape(*self.shape[:2], self.n_heads, -1)).reshape(gate.shape), *args[2:])

    @property
    def site(self) -> Any:
        return self.__dict__["site"]

    def entered(self, arguments: Mapping[str, Any]) -> None:
        self.padding = arguments.get("attention_mask")
        hidden = arguments.get("hidden_states")
        self.shape = () if hidden is None else tuple(hidden.shape)

    def active(self) -> bool:
        points = (point for name, point in self.named_children() if name != "hook_z" and isinstance(point, HookPoint))
        return bool(self.restrictions) or any(listened(point) for point in points)

    def replacements(self) -> Mapping[str, Callable[..., Any]]:
        return {name: getattr(self, method) for name, method in self.replaced.items()} if self.active() else {}

    def uncached(self, *states: Any) -> None:
        if any(state is not None and state is not False for state in states):
            raise ValueError(
                f"a {self.kind} layer continues a cache while it is restricted or its state is listened to; expected a "
                "forward over whole sequences, because a cached state does not say which tokens made it."
            )

    def convolve(self, original: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hook_{q,k,v}_pre_conv [B, T, channels] on the way into the convolution."""
        parts = []
        for (name, width), part in zip(self.channels(), self._split(x), strict=True):
            point = getattr(self, f"hook_{name}_pre_conv")
            assert part.shape[1] == width
            parts.append(point(part.mT).mT if listened(point) else part)
        changed = any(new is not old for new, old in zip(parts, self._split(x), strict=True))
        return original(torch.cat(parts, 1) if changed else x, weight, *args, **kwargs)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([width for _, width in self.channels()], dim=1)

    def channels(self) -> list[tuple[str, int]]:
        """Which channels of the convolution's input are those of q, k and v, in their order."""
        raise NotImplementedError


class DeltaRule(Bound, DeltaRuleMixer):
    """Qwen3-Next, Qwen3.5, OLMo-Hybrid: keys of G heads, values of H heads, L2-normalised inside the function."""

    kind = "gdn"
    replaced: ClassVar[Mapping[str, str]] = {
        "torch_chunk_gated_delta_rule": "scan",
        "torch_recurrent_gated_delta_rule": "scan",
        "causal_conv1d_fn": "convolve",
    }

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        DeltaRuleMixer.__init__(self, n_heads, n_kv_heads, impl)

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return hasattr(home, "torch_chunk_gated_delta_rule") and hasattr(site, "A_log") and hasattr(site, "conv1d")

    def channels(self) -> list[tuple[str, int]]:
        return [("q", self.site.key_dim), ("k", self.site.key_dim), ("v", self.site.value_dim)]

    def scan(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        query, key, value = self.hook_q(query), self.hook_k(key), self.hook_v(value)
        beta, g = self.hook_beta(beta), self.hook_log_decay(g)
        if not self.restrictions and not listened(self.hook_ssm_state):
            out, state = original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
            )  # fmt: skip
            return self.hook_recurrence_out(out), state
        self.uncached(initial_state, output_final_state)
        if use_qk_l2norm_in_kernel:
            query, key = l2_normalise(at_least_fp32(query)), l2_normalise(at_least_fp32(key))
        query, key = by_value_head(query, self.n_heads), by_value_head(key, self.n_heads)
        operands = {"key": key, "value": value, "log_decay": g, "beta": beta}
        return self.hook_recurrence_out(self.recur(query, operands).to(value.dtype)), None


class SelectiveDecay(Bound, ScalarDecayMixer):
    """Mamba-2 (Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba2): query C, key B of G groups, value x, beta dt."""

    kind = "mamba2"
    hook_beta: HookPoint
    replaced: ClassVar[Mapping[str, str]] = {"mamba2_chunk_scan": "scan", "causal_conv1d_fn": "convolve"}

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        ScalarDecayMixer.__init__(self, n_heads, n_kv_heads, impl)
        for name in ("q_pre_conv", "k_pre_conv", "v_pre_conv", "beta"):
            setattr(self, f"hook_{name}", HookPoint())

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return hasattr(home, "mamba2_chunk_scan") and hasattr(site, "A_log") and hasattr(site, "conv1d")

    def effective_rows(self, positions: Int[Tensor, " R"], **recorded: Tensor) -> Float[Tensor, "B H R T"]:
        key, query, dt, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "q", "beta", "log_decay"))
        query, key = by_value_head(query, self.n_heads), by_value_head(key, self.n_heads)
        rows = self._value_rows(partial(linear_decay, impl=self.impl), positions, query, key=key, log_decay=log_decay)
        rows = rows * dt.permute(0, 2, 1)[:, :, None]
        at = positions.to(rows.device)
        rows[:, :, torch.arange(len(at), device=rows.device), at] += at_least_fp32(self.site.D)[:, None]  # skip D x_t
        return rows

    def states(self, positions: Int[Tensor, " P"], **recorded: Tensor) -> Float[Tensor, "B P H K V"]:
        key, value, dt, log_decay = (at_least_fp32(recorded[name]) for name in ("k", "v", "beta", "log_decay"))
        operation, key = partial(linear_decay, impl=self.impl), by_value_head(key, self.n_heads)
        return self._states_at(operation, positions, key=key, value=value * dt[..., None], log_decay=log_decay)

    def channels(self) -> list[tuple[str, int]]:
        groups = self.site.n_groups * self.site.ssm_state_size
        return [("v", self.site.conv_dim - 2 * groups), ("k", groups), ("q", groups)]

    def scan(
        self, original: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        *, D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), initial_states: Tensor | None = None,
        return_final_states: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        value, key, query = self.hook_v(hidden_states), self.hook_k(B), self.hook_q(C)
        raw = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        step = torch.clamp(F.softplus(raw) if dt_softplus else raw, min=dt_limit[0], max=dt_limit[1])
        wide = step.float()
        beta = self.hook_beta(wide)
        decays = A.float() * beta
        log_decay = self.hook_log_decay(decays)
        edited = beta is not wide or log_decay is not decays
        own = self.restrictions or listened(self.hook_ssm_state) or listened(self.hook_ssm_write)
        if not own and not edited:
            result = original(
                value, dt, A, key, query, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
                initial_states=initial_states, return_final_states=return_final_states, **kwargs,
            )  # fmt: skip
            if not return_final_states:
                return self.hook_recurrence_out(result)
            return self.hook_recurrence_out(result[0]), result[1]
        self.uncached(initial_states, return_final_states)
        query, key = (by_value_head(at_least_fp32(x), self.n_heads) for x in (query, key))
        out = self.recur(query, key, at_least_fp32(value) * beta[..., None], log_decay)
        if D is not None:
            out = out + D[:, None].float() * at_least_fp32(value)
        return self.hook_recurrence_out(out.contiguous())  # families call view() on it
