"""Attention that kernels.attention has no form for: soft-capped scores, and batches with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.attention import Band
from models.softmax_rows import ROWS, mixed, weights


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
