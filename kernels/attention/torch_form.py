"""attention without a T x S matrix.

Full causal attention is torch's fused SDPA. Bands: blocks of queries against only the keys they can see, exactly
masked; inside torch.compile on CUDA FlexAttention with a stored block mask. Learned sinks: blocks of queries with an
explicit softmax (torch_statistics). Memory is O(S).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.bands import FLEX_BLOCK, Band, binding, visible
from kernels.attention.precision import common_dtype
from kernels.attention.torch_statistics import by_rows

QUERY_BLOCK = 256  # measured on CPU for windows 32..512, forward and backward
FLEX_MIN_DIM = 16  # FlexAttention's smallest head dimension


def attention_torch(
    query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...], scale: float, sink_logits: Tensor | None = None
) -> Tensor:
    dtype, device = value.dtype, value.device.type
    work = common_dtype(query, key, value)
    bands = binding(bands, key.shape[1])
    if sink_logits is not None:  # no fused form of torch has the extra column
        q, k, v = (x.to(work) for x in (query, key, value))
        with torch.autocast(device, enabled=False):
            learned = by_rows(q, k, v, bands, scale, sink_logits, None, None, statistics=False)[0]
        assert learned is not None
        return learned.to(dtype)
    q, k, v = (x.to(work).transpose(1, 2) for x in (query, key, value))
    t, s = q.shape[2], k.shape[2]
    with torch.autocast(device, enabled=False):
        fused = device == "cuda" and work != torch.float64
        # FlexAttention compiles once for every set of bands (seconds each): only a caller compiled anyway pays that
        compiling = torch.compiler.is_compiling()
        if not bands and t == s and (fused or device == "cpu"):
            out = _sdpa(q, k, v, scale, causal=True)
        elif fused and bands and compiling and t >= FLEX_BLOCK and min(q.shape[3], v.shape[3]) >= FLEX_MIN_DIM:
            from kernels.attention.flex_form import flex, stored_plan

            out = flex(q, k, v, stored_plan(t, s, bands, value.device), scale)
        else:
            out = by_blocks(q, k, v, bands, scale)
    return out.transpose(1, 2).to(dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    share = q.shape[1] // k.shape[1]
    # only the CPU kernel and CUDA's flash kernel share kv heads; the others would build the T x S matrix
    flash = mask is None and q.dtype in (torch.float16, torch.bfloat16) and k.shape[3] == v.shape[3] <= 256
    grouped = share > 1 and (q.device.type == "cpu" or flash)
    if share > 1 and not grouped:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, bands: tuple[Band, ...], scale: float) -> Tensor:
    """Blocks of queries, each against the first `sinks` and the last window + block keys, masked exactly.

    Keys are cut into pieces once and pieces joined: slicing them block by block would make backward fill a tensor of
    all keys with zeros for every block.
    """
    t, s = q.shape[2], k.shape[2]
    offset = s - t
    window = min([s] + [band.window for band in bands if band.window is not None])
    sinks = max([0] + [band.sinks for band in bands])
    k_pieces, v_pieces = k.split(QUERY_BLOCK, 2), v.split(QUERY_BLOCK, 2)
    starts = torch.arange(s, device=q.device).split(QUERY_BLOCK)
    outs = []
    for i, q_block in enumerate(q.split(QUERY_BLOCK, 2)):
        first = offset + i * QUERY_BLOCK
        last = first + q_block.shape[2] - 1
        low, high = max(0, first - window + 1) // QUERY_BLOCK, last // QUERY_BLOCK
        pieces = [p for p in range(high + 1) if p >= low or p * QUERY_BLOCK < sinks]
        key_at = torch.cat([starts[p] for p in pieces])
        mask = visible(torch.arange(first, last + 1, device=q.device), key_at, bands)
        k_block, v_block = (torch.cat([x[p] for p in pieces], 2) for x in (k_pieces, v_pieces))
        outs.append(_sdpa(q_block, k_block, v_block, scale, mask=mask))
    return torch.cat(outs, 2)


def pattern_torch(
    query: Tensor, key: Tensor, bands: tuple[Band, ...], scale: float, sink_logits: Tensor | None = None
) -> Tensor:
    work = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    offset, device = key.shape[1] - query.shape[1], query.device
    with torch.autocast(device.type, enabled=False):
        q, k = (x.to(work).transpose(1, 2) for x in (query * scale, key))
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = (grouped @ k.unsqueeze(2).mT).flatten(1, 2)
        query_at = torch.arange(offset, key.shape[1], device=device)
        mask = visible(query_at, torch.arange(key.shape[1], device=device), bands)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sink_logits is None:
            return scores.softmax(-1)
        column = sink_logits.to(work)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
