"""Attention weights that kernels.attention has no form for: soft-capped scores, and patterns with learned sinks.

s_ts = cap tanh(scale q_t . k_s / cap) (Gemma 2); a learned sink logit is one more column, dropped after the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.attention import Band
from kernels.attention.bands import visible

ROWS = 256  # queries whose scores exist at a time


def weights(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    query_at: Int[Tensor, " T"],
    key_at: Int[Tensor, " S"],
    *,
    bands: tuple[Band, ...],
    scale: float,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """The probabilities, float32 (float64 for such queries); hidden keys hold 0, rows sum to 1 minus the sink's."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(work).mul(scale).unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)  # B G share T K
    scores = (grouped @ key.to(work).permute(0, 2, 3, 1).unsqueeze(2)).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(query_at, key_at, bands), float("-inf"))
    if sink_logits is None:
        return scores.softmax(-1)
    column = sink_logits.to(work)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def softcapped_attention(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"],
    *,
    bands: tuple[Band, ...],
    scale: float,
    softcap: float,
) -> Float[Tensor, "B T H V"]:
    """Blocks of queries, each against the keys its bands can reach; made again in backward, so memory stays O(S)."""
    length, offset = key.shape[1], key.shape[1] - query.shape[1]

    def block(q: Tensor, k: Tensor, v: Tensor, first: int, low: int) -> Tensor:
        query_at = torch.arange(first, first + q.shape[1], device=q.device)
        key_at = torch.arange(low, low + k.shape[1], device=q.device)
        p = weights(q, k, query_at, key_at, bands=bands, scale=scale, softcap=softcap)
        return mixed(p, v)

    outs = []
    for start in range(0, query.shape[1], ROWS):
        q, first = query[:, start : start + ROWS], offset + start
        last = first + q.shape[1]
        low = _first_visible(first, bands)
        operands = (q, key[:, low:last], value[:, low:last], first, low)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands[:3]):  # type: ignore[union-attr]
            outs.append(checkpoint(block, *operands, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(block(*operands))
    assert length == last
    return torch.cat(outs, 1)


def mixed(p: Float[Tensor, "B H T S"], value: Float[Tensor, "B S G V"]) -> Float[Tensor, "B T H V"]:
    """sum over s of p_ts v_s in value's dtype, each kv head serving its query heads."""
    grouped = p.to(value.dtype).unflatten(1, (value.shape[2], -1))
    return (grouped @ value.transpose(1, 2).unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def _first_visible(first: int, bands: tuple[Band, ...]) -> int:
    """The first key that the query at `first` can see, so that no later query of its block can see an earlier one."""
    if any(band.sinks for band in bands):
        return 0
    return max([0] + [first - band.window + 1 for band in bands if band.window is not None])


def without_padding(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"],
    pads: Sequence[int],
) -> Float[Tensor, "B T H V"]:
    """attend(query, key, value) of each sample without its `pads` first tokens, whose own outputs are zero.

    Exact whatever the bands: samples with the same padding go together, and positions count from the first real token.
    """
    offset = key.shape[1] - query.shape[1]
    out = query.new_zeros(*query.shape[:3], value.shape[3]).to(value.dtype)
    for pad in sorted(set(pads)):
        rows = torch.tensor([row for row, own in enumerate(pads) if own == pad], device=query.device)
        first = max(0, pad - offset)
        found = attend(query[rows, first:], key[rows, pad:], value[rows, pad:])
        out = out.index_copy(0, rows, torch.nn.functional.pad(found, (0, 0, 0, 0, first, 0)))
    return out
