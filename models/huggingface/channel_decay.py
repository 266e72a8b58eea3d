"""Kimi Delta Attention: the delta rule with a decay per key channel, with an exact window.

S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K).
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
from models.mixers.delta_rule import l2_normalise
from models.mixers.mixer import at_least_fp32


class ChannelDecay(Bound):
    """Kimi-Linear's layer; hook_log_decay is [B, T, H, K]."""

    kind = "kda"
    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_log_decay: HookPoint
    hook_beta: HookPoint
    hook_recurrence_out: HookPoint
    replaced: ClassVar[Mapping[str, str]] = {
        "chunk_kimi_delta_attention": "scan",
        "recurrent_kimi_delta_attention": "scan",
        "causal_conv1d_fn": "convolve",
    }

    def __init__(self, n_heads: int, n_kv_heads: int, impl: Impl):
        super().__init__(n_heads, n_kv_heads, impl)
        for name in ("q_pre_conv", "k_pre_conv", "v_pre_conv", "q", "k", "v", "beta", "log_decay"):
            setattr(self, f"hook_{name}", HookPoint())
        for name in ("recurrence_out", "z"):
            setattr(self, f"hook_{name}", HookPoint())

    @staticmethod
    def matches(site: nn.Module, home: Any) -> bool:
        return hasattr(home, "chunk_kimi_delta_attention") and hasattr(site, "conv1d") and hasattr(site, "b_proj")

    def channels(self) -> list[tuple[str, int]]:
        return [(name, self.site.qkv_dim) for name in ("q", "k", "v")]

    def scan(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        query, key, value = self.hook_q(query), self.hook_k(key), self.hook_v(value)
        g, beta = self.hook_log_decay(g), self.hook_beta(beta)
        if not self.restrictions:
            out, state = original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
            )  # fmt: skip
            return self.hook_recurrence_out(out), state
        self.uncached(initial_state, output_final_state)
        dtype = value.dtype
        query, key = at_least_fp32(query), at_least_fp32(key)
        if use_qk_l2norm_in_kernel:
            query, key = l2_normalise(query), l2_normalise(key)
        value, g, beta = at_least_fp32(value), at_least_fp32(g), at_least_fp32(beta)
        window = min(restriction.window for restriction in self.restrictions)
        return self.hook_recurrence_out(windowed(original, query, key, value, g, beta, window).to(dtype)), None


def windowed(
    scan: Callable[..., Any],
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    window: int,
) -> Float[Tensor, "B T H V"]:
    """o_t from the last `window` tokens; `scan` is the family's function, restarted at every block of w tokens.

    A window is the end of one block and the beginning of the next. With M_t the product of transitions from the block's
    start to t and p_s = (transitions after s to the block's end) beta_s k_s: what the previous block adds is
    sum over its s > t - w of (q_t . M_t p_s) v_s. M_t^T q_t is what the scan reads from the state I without writing.
    """
    batch, length, heads, width = query.shape
    w = min(window, length)
    blocks = -(-length // w)
    pad = blocks * w - length
    q, k, v, g = (_cut(F.pad(x, (0, 0, 0, 0, 0, pad)), w) for x in (query, key, value, log_decay))
    b = _cut(F.pad(beta, (0, 0, 0, pad)), w)
    settings = {"output_final_state": False, "chunk_size": min(64, w)}
    out, _ = scan(q, k, v, g=g, beta=b, initial_state=None, **settings)
    if blocks > 1 and w > 1:
        unit = torch.eye(width, dtype=q.dtype, device=q.device).expand(len(q), heads, -1, -1)
        reads, _ = scan(q, k, torch.zeros_like(k), g=g, beta=b, initial_state=unit, **settings)
        left = _writes(k, g, b)
        reads, left, earlier = (x.unflatten(0, (batch, blocks)) for x in (reads, left, v))
        scores = torch.einsum("bnthk,bnshk->bnhts", reads[:, 1:], left[:, :-1])
        late = torch.ones(w, w, dtype=torch.bool, device=q.device).triu(1)  # s > t inside their blocks
        added = torch.einsum("bnhts,bnshv->bnthv", scores * late, earlier[:, :-1])
        out = torch.cat([out.unflatten(0, (batch, blocks))[:, :1], out.unflatten(0, (batch, blocks))[:, 1:] + added], 1)
        out = out.flatten(0, 1)
    return out.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def _cut(x: Tensor, w: int) -> Tensor:
    return x.unflatten(1, (-1, w)).flatten(0, 1)


def _writes(
    key: Float[Tensor, "N W H K"], log_decay: Float[Tensor, "N W H K"], beta: Float[Tensor, "N W H"]
) -> Float[Tensor, "N W H K"]:
    """p_s of every token: how its write stands at the end of its block. K x K transitions, from the end backwards."""
    later = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device).expand(*key[:, 0].shape[:2], -1, -1)
    found = []
    for s in range(key.shape[1] - 1, -1, -1):
        p = torch.einsum("nhij,nhj->nhi", later, beta[:, s, :, None] * key[:, s])
        found.append(p)
        later = (later - p[..., None] * key[:, s, :, None, :]) * log_decay[:, s].exp()[..., None, :]
    return torch.stack(found[::-1], 1)
