"""Mixers whose state decays channel by channel: Mamba-1 and RG-LRU, with exact windows; and short convolutions.

h_t = a_t * h_{t-1} + b_t, elementwise. Windowed: h_t = sum over s in [t-w+1, t] of (a_{s+1} ... a_t) b_s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kernels.operands import Impl
from models.huggingface.recurrent import Bound
from models.mixers.mixer import listened


def diagonal_scan(
    decay: Float[Tensor, "B T *C"], write: Float[Tensor, "B T *C"], window: int | None
) -> Float[Tensor, "B T *C"]:
    """Every h_t, made of its last `window` tokens (None: of all); never by subtracting.

    Tokens are cut into blocks of w: a window is the end of one block and the beginning of the next, so it is a scan
    from the block's start plus the decayed scan from the previous block's end. O(T) in w steps over all blocks at once.
    """
    length = write.shape[1]
    w = length if window is None else min(window, length)
    blocks = -(-length // w)
    tail = (0, 0) * (write.ndim - 2) + (0, blocks * w - length)
    a, b = (F.pad(x, tail).unflatten(1, (blocks, w)) for x in (decay, write))
    state, product, forward, products = torch.zeros_like(b[:, :, 0]), torch.ones_like(a[:, :, 0]), [], []
    for i in range(w):
        state, product = a[:, :, i] * state + b[:, :, i], a[:, :, i] * product
        forward.append(state)
        products.append(product)
    out = torch.stack(forward, 2)
    if blocks > 1 and w > 1:
        suffix, carried, later = torch.zeros_like(state), torch.ones_like(product), []
        for i in range(w - 1, 0, -1):
            suffix, carried = suffix + carried * b[:, :, i], carried * a[:, :, i]
            later.append(suffix)  # what tokens i .. w - 1 leave at the end of their block
        ends = torch.stack(later[::-1], 2)[:, :-1]
        out = torch.cat([out[:, :1], _joined(out[:, 1:], torch.stack(products, 2)[:, 1:, :-1], ends)], 1)
    return out.flatten(1, 2)[:, :length]


def _joined(own: Tensor, products: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([own[:, :, :-1] + products * ends, own[:, :, -1:]], 2)


class SelectiveScan(Bound):
    """Mamba-1 (Jamba): one "head"; query C, key B, value x, beta dt per channel."""

    kind = "mamba1"
    hook_z: HookPoint
    replaced: ClassVar[Mapping[str, str]] = {"mamba_selective_scan": "scan"}

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("q", "k", "v", "beta", "recurrence_out", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return hasattr(home, "mamba_selective_scan") and hasattr(site, "A_log") and hasattr(site, "x_proj")

    def scan(
        self, original: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
        D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
        delta_softplus: bool = False, return_last_state: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Operands [B, channels, T]; the hook points see [B, T, 1, channels]."""
        value, key, query = self._seen("v", hidden_states), self._seen("k", B), self._seen("q", C)
        raw = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        plain = F.softplus(raw) if delta_softplus else raw
        step = self._seen("beta", plain)
        if not self.restrictions and step is plain:
            result = original(
                value, dt, A, key, query, D=D, z=None, delta_bias=delta_bias, delta_softplus=delta_softplus,
                return_last_state=return_last_state, **kwargs,
            )  # fmt: skip
            out, state = result if return_last_state else (result, None)
        else:
            self.uncached(return_last_state)
            out, state = self._windowed(value, step, A, key, query), None
            out = out if D is None else out + value * D[None, :, None]
        out = self._seen("recurrence_out", out)
        out = out if z is None else out * F.silu(z)
        return (out, state) if return_last_state else out

    def _seen(self, name: str, x: Tensor) -> Tensor:
        point: HookPoint = getattr(self, f"hook_{name}")
        return point(x.mT.unsqueeze(2)).squeeze(2).mT if listened(point) else x

    def _windowed(self, value: Tensor, step: Tensor, A: Tensor, key: Tensor, query: Tensor) -> Tensor:
        decay = torch.exp(A * step.mT[..., None])  # B T channels N
        write = (step * value.float()).mT[..., None] * key.mT[:, :, None].float()
        windows = [restriction.window for restriction in self.restrictions]
        states = diagonal_scan(decay, write, min(windows) if windows else None)
        return (states @ query.mT[..., None].to(states.dtype)).squeeze(-1).mT.to(value.dtype)


class GatedRecurrence(Bound):
    """RG-LRU (RecurrentGemma): hook_v is the gated input, hook_log_decay the log of the gate, [B, T, H, width]."""

    kind = "rglru"
    hook_v: HookPoint
    hook_log_decay: HookPoint
    hook_recurrence_out: HookPoint

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("v", "log_decay", "recurrence_out", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return hasattr(getattr(site, "rg_lru", None), "_rnn_scan")

    def bind(self, site: nn.Module) -> None:
        super().bind(site)
        self.conv_width = int(self.site.conv1d_width)

    def methods(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return [(self.site.rg_lru, "_rnn_scan", self.scan)] if self.active() else []

    def scan(
        self, original: Callable[..., Any], hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor,
        recurrent_states: Tensor | None, acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        heads = (self.n_heads, -1)
        value = self.hook_v(hidden_states.unflatten(-1, heads)).flatten(2)
        plain = recurrent_gate.unflatten(-1, heads)
        if listened(self.hook_log_decay):
            plain = self.hook_log_decay(plain.log()).exp()
        gate, last = plain.flatten(2), None
        if self.restrictions:
            self.uncached(recurrent_states)
            window = min(restriction.window for restriction in self.restrictions)
            decay = (gate * ~reset).to(acc_dtype)
            out = diagonal_scan(decay, value.to(acc_dtype), window).to(value.dtype)
        else:
            out, last = original(
                hidden_states=value, recurrent_gate=gate, reset=reset, recurrent_states=recurrent_states,
                acc_dtype=acc_dtype,
            )  # fmt: skip
        return self.hook_recurrence_out(out.unflatten(-1, heads)).flatten(2), last


class ShortConvolution(Bound):
    """A gated short convolution (LFM2) as the whole mixer: W taps see W tokens; a restriction silences older taps."""

    kind = "conv"
    hook_v: HookPoint
    hook_recurrence_out: HookPoint
    replaced: ClassVar[Mapping[str, str]] = {"causal_conv1d_fn": "convolved"}

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("v", "recurrence_out", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return isinstance(getattr(site, "conv", None), nn.Conv1d) and hasattr(home, "causal_conv1d_fn")

    def bind(self, site: nn.Module) -> None:
        super().bind(site)
        self.conv_width = 1  # the taps are the path's own window

    def convolved(
        self, original: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.restrictions:
            window = min(restriction.window for restriction in self.restrictions)
            kept = torch.arange(weight.shape[-1], device=weight.device) >= weight.shape[-1] - window
            weight = weight * kept
        value = self.hook_v(x.mT.unsqueeze(2)).squeeze(2).mT
        return self.hook_recurrence_out(original(value, weight, *args, **kwargs).mT.unsqueeze(2)).squeeze(2).mT
