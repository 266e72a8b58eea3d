"""Bands on CUDA under torch.compile: FlexAttention with block masks that are made once per (T, S, bands, device).

Imported only when a band meets CUDA in a compiled caller, because it loads torch's compiler (2.6 s).
"""

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.attention.bands import FLEX_BLOCK, Band


def build_plan(t: int, s: int, bands: tuple[Band, ...], device: torch.device) -> BlockMask:
    """BlockMask made from block corners: create_block_mask would build the T x S mask (17 GB at 131,072 tokens)."""
    offset = s - t
    limits = [(band.window, band.sinks) for band in bands if band.window is not None]

    def visible_at(b: Tensor, h: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        position = query_at + offset
        mask = key_at <= position
        for window, sinks in limits:
            mask = mask & ((position - key_at < window) | (key_at < sinks))
        return mask

    first_q = torch.arange(0, t, FLEX_BLOCK, device=device)[:, None] + offset
    first_k = torch.arange(0, s, FLEX_BLOCK, device=device)[None, :]
    last_q, last_k = first_q + FLEX_BLOCK - 1, first_k + FLEX_BLOCK - 1
    some = first_k <= last_q
    every = (last_k <= first_q) & (last_q < s) & (last_k < s)  # a block over the edge is masked place by place
    for window, sinks in limits:
        some = some & ((first_q - last_k < window) | (first_k < sinks))
        every = every & ((last_q - first_k < window) | (last_k < sinks))
    partial, full = some & ~every, some & every
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible_at, seq_lengths=(t, s)
    )


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and key block indices [1, 1, rows, columns], chosen ones first."""
    order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


# Plans made so far. A plain dict with string keys, not lru_cache: torch.compile looks a plan up here while tracing,
# whereas it would trace through an lru_cache and build the mask inside the graph.
_PLANS: dict[str, BlockMask] = {}


def _plan_name(t: int, s: int, bands: tuple[Band, ...], device: torch.device) -> str:
    return f"{t}/{s}/{device.type}:{device.index}/" + "/".join([f"{band.window},{band.sinks}" for band in bands])


@torch._dynamo.disable(reason="no block mask yet: call kernels.attention.attention_plan before compiling")
def _make_plan(t: int, s: int, bands: tuple[Band, ...], device: torch.device) -> BlockMask:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not serve a later training step
        plan = build_plan(t, s, bands, device)
    _PLANS[_plan_name(t, s, bands, device)] = plan
    return plan


def stored_plan(t: int, s: int, bands: tuple[Band, ...], device: torch.device) -> BlockMask:
    """The stored plan, made now if need be; made while tracing it costs the graph one break and one recompilation."""
    name = _plan_name(t, s, bands, device)
    return _PLANS[name] if name in _PLANS else _make_plan(t, s, bands, device)


def flex(q: Tensor, k: Tensor, v: Tensor, plan: BlockMask, scale: float) -> Tensor:
    """FlexAttention, for callers that are being compiled; run as it stands it would build the T x S matrix."""
    assert torch.compiler.is_compiling()
    return flex_attention(q, k, v, block_mask=plan, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
