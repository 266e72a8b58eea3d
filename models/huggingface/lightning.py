"""Lightning attention inside MiniMax's module: no function to replace, so its projections and its norm are the doors.

q, k, v are read at the output of qkv_proj; what the recurrence made is the input of the norm behind it. A restriction
or an edit computes that input again with kernels.linear_decay, from the same q, k, v and slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from kernels.operands import Impl
from models.huggingface.recurrent import Bound
from models.mixers.lightning import Lightning
from models.mixers.mixer import at_least_fp32, listened
from models.mixers.recurrent import ScalarDecayMixer


class FixedDecay(Bound, ScalarDecayMixer):
    """S_t = gamma_h S_{t-1} + k_t v_t^T with the layer's own slopes."""

    kind = "lightning"
    scale = 1.0
    _scaled = Lightning._scaled
    effective_rows = Lightning.effective_rows
    states = Lightning.states

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        ScalarDecayMixer.__init__(self, n_heads, n_kv_heads, impl)
        self.projected: Tensor | None = None
        self.cached = False

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return all(hasattr(site, name) for name in ("slope_rate", "qkv_proj", "output_gate", "norm", "act_fn"))

    def bind(self, site: nn.Module) -> None:
        self.__dict__["site"] = site
        self.padding = None
        parts: Any = site
        parts.qkv_proj.register_forward_hook(self._remember)
        parts.norm.register_forward_pre_hook(self._replace)
        parts.output_gate.register_forward_hook(self._gated)

    def entered(self, arguments: Mapping[str, Any]) -> None:
        super().entered(arguments)
        self.cached = arguments.get("cache", arguments.get("past_key_values")) is not None
        self.projected = None

    def replacements(self) -> Mapping[str, Callable[..., Any]]:
        return {}

    def _remember(self, module: nn.Module, args: Any, value: Tensor) -> None:
        if self.active():
            self.projected = value

    def _gated(self, module: nn.Module, args: Any, value: Tensor) -> Tensor | None:
        return self.hook_gate_input(value) if listened(self.hook_gate_input) else None

    def _replace(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """The norm's input: MiniMax's own, unless something asks for another."""
        projected, self.projected = self.projected, None
        if projected is None:
            return None
        mixed = self.site.act_fn(projected)
        if self.padding is not None:
            mixed = (mixed * self.padding[:, :, None]).to(mixed.dtype)
        batch, time, _ = mixed.shape
        plain = mixed.reshape(batch, time, self.n_heads, -1).chunk(3, dim=-1)
        slopes = -at_least_fp32(self.site.slope_rate).flatten()
        given = tuple(point(x) for point, x in zip((self.hook_q, self.hook_k, self.hook_v), plain, strict=True))
        decay = self.hook_log_decay(slopes)
        edited = decay is not slopes or any(new is not old for new, old in zip(given, plain, strict=True))
        own = self.restrictions or listened(self.hook_ssm_state) or listened(self.hook_ssm_write)
        out = args[0].unflatten(-1, (self.n_heads, -1))
        if own or edited:
            self.uncached(self.cached)
            query, key, value = given
            out = self.recur(query, key, value, decay).to(args[0].dtype)
        return (self.hook_recurrence_out(out).flatten(2),)
