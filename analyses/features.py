"""Residual-stream features of many prompts: batched, no logits, and what several prompts begin with computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

import models
from hooks.streams import record_streams, stream_names

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65_536}
WORTH_SHARING = 0.1
"""Share of the tokens that must be saved: a cached token costs a little more than a plain one."""
TOLERANCE = 1e-5
"""Of batching and of shared prefixes, in fp32: |difference| <= TOLERANCE x the feature's largest entry."""


@dataclass(frozen=True, eq=False)
class Extracted:
    """`values[n, p, f]` is feature `names[f]` of prompt n at position p, fp32; `computed` counts tokens forwarded."""

    names: tuple[str, ...]
    values: Float[np.ndarray, "N P F D"]
    computed: int


@torch.no_grad()
def extract(
    model: Any,
    ids: Int[np.ndarray, "N T"],
    positions: Sequence[int] = (-1,),
    *,
    share_prefix: bool = False,
    tokens_per_batch: int | None = None,
) -> Extracted:
    """hooks.stream_names of every prompt at `positions` (the same for all; negative from the end).

    The mixer's and the MLP's outputs are differences of these: resid_mid - resid_pre, resid_post - resid_mid. Tokens
    behind the last position are not computed. share_prefix (native models; others compute every prompt whole): what
    prompts begin with in common goes through models.Cache once. Of prompts that differ by where a needle stands in one
    haystack this saves about half; where it would save little nothing is shared. Memory: the activations of
    tokens_per_batch tokens, plus the cache.
    """
    length = ids.shape[1]
    where = sorted({position % length for position in positions if -length <= position < length})
    if not len(ids) or not where or len(where) != len(positions):
        raise ValueError(
            f"{len(ids)} prompts of {length} tokens at positions {tuple(positions)}; expected prompts and different "
            "positions inside them"
        )
    ids, order = ids[:, : where[-1] + 1], [where.index(position % length) for position in positions]
    budget = tokens_per_batch or TOKENS_PER_BATCH[model.device.type]
    names = stream_names(model)
    values, computed = None, 0
    for rows, streams, tokens in _forwards(model, ids, where, budget, share_prefix):
        part = torch.stack([streams[name][:, order] for name in names], 2).cpu().numpy()
        if values is None:
            values = np.empty((len(ids), *part.shape[1:]), dtype=np.float32)
        values[rows] = part
        computed += tokens
    assert values is not None
    return Extracted(names, values, computed)


@torch.no_grad()
def mean_embedding(model: Any, ids: Int[np.ndarray, "N T"]) -> Float[np.ndarray, "N D"]:
    """The mean of a prompt's token embeddings, fp32: what uniform attention without any weights could pass on."""
    rows = [model.embed(torch.from_numpy(row)[None].to(model.device))[0].float().mean(0) for row in ids]
    return torch.stack(rows).cpu().numpy()


Batch = tuple[np.ndarray, dict[str, torch.Tensor], int]


def _forwards(model: Any, ids: np.ndarray, where: Sequence[int], budget: int, share_prefix: bool) -> Iterator[Batch]:
    """Rows of a batch, their streams, and the tokens it took."""
    if share_prefix and isinstance(model, models.HybridLM):
        trunk, shared = common_prefixes(ids)
        shared = np.minimum(shared, where[0])  # what is read must be computed after the branching
        if shared.sum() - shared.max() >= WORTH_SHARING * ids.size:
            return _sharing(model, ids, where, budget, trunk=trunk, shared=shared)
    return _whole(model, ids, where, budget)


def _whole(model: Any, ids: np.ndarray, where: Sequence[int], budget: int) -> Iterator[Batch]:
    size = max(1, budget // ids.shape[1])
    for first in range(0, len(ids), size):
        rows = np.arange(first, min(first + size, len(ids)))
        batch = torch.from_numpy(ids[rows]).to(model.device)
        with record_streams(model, where) as streams:
            model.final_hidden(batch)
        yield rows, streams, batch.numel()


def _sharing(
    model: Any, ids: np.ndarray, where: Sequence[int], budget: int, *, trunk: int, shared: np.ndarray
) -> Iterator[Batch]:
    """Prompts in order of how long they follow the trunk, each batch continuing the trunk where its first one leaves.

    The trunk is the prompt that the others follow longest, such as the one whose needle comes last.
    """
    order = np.argsort(shared, kind="stable")
    row = torch.from_numpy(ids[trunk][None]).to(model.device)
    cache, first = models.Cache(), 0
    while first < len(order):
        start = int(shared[order[first]])
        rows = order[first : first + max(1, budget // (ids.shape[1] - start))]
        tokens = start - cache.length
        if tokens:
            model.final_hidden(row[:, cache.length : start], cache=cache)
        batch = torch.from_numpy(ids[rows, start:]).to(model.device)
        with record_streams(model, [position - start for position in where]) as streams:
            model.final_hidden(batch, cache=cache.repeat(len(rows)))
        yield rows, streams, tokens + batch.numel()
        first += len(rows)


def common_prefixes(ids: Int[np.ndarray, "N T"]) -> tuple[int, Int[np.ndarray, " N"]]:
    """The row that shares most with the others, and how many leading tokens each row has in common with it."""
    order = sorted(range(len(ids)), key=lambda row: ids[row].astype(">i8").tobytes())
    near = np.array([_common(ids[a], ids[b]) for a, b in pairwise(order)], dtype=np.int64)
    # in this order two rows share the least of what the neighbours between them share
    best, lengths = -1, np.zeros(len(ids), dtype=np.int64)
    for at in range(len(order)):
        ahead = np.minimum.accumulate(near[at:])
        behind = np.minimum.accumulate(near[:at][::-1])[::-1]
        if best < 0 or ahead.sum() + behind.sum() > lengths.sum():
            best, lengths = at, np.concatenate([behind, ahead])
    found = np.full(len(ids), ids.shape[1])
    found[[row for at, row in enumerate(order) if at != best]] = lengths
    return order[best], found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    different = a != b
    return int(different.argmax()) if different.any() else len(a)
