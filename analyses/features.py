"""Residual-stream features of many prompts: batched, no logits, and what several prompts begin with computed once.

On a GPU nothing waits for the device between the first forward and the last: prompts go there once, features come back
once, so that kernels queue up while Python is busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

import models
from analyses.shared_prefixes import Schedule, schedule, whole
from hooks.streams import record_streams, stream_names

CPU_TOKENS = 4096  # of a batch
GPU_BYTES = 80 * 2**20
"""Of one [tokens, width] tensor of a batch; more pays little, less launches short rests of prompts (LOG.md)."""
CPU_LAUNCH, GPU_LAUNCH = 32.0, 5e11
"""What a forward costs whatever it computes: in tokens (measured on the miniatures), in FLOP of a model's layers."""
GPU_ALIGN = 64  # tokens: kernels are compiled anew for lengths that are no multiple of 16
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
    haystack this saves about half; where it would save little nothing is shared. tokens_per_batch None: 4096 on a CPU,
    on a GPU what makes 80 MB of residual stream, at least one prompt. Memory: the activations of a batch, the trunk's
    keys and values, and the features of all prompts given.
    """
    length = ids.shape[1]
    where = sorted({position % length for position in positions if -length <= position < length})
    if not len(ids) or not where or len(where) != len(positions):
        raise ValueError(
            f"{len(ids)} prompts of {length} tokens at positions {tuple(positions)}; expected prompts and different "
            "positions inside them"
        )
    asked, ids = [where.index(position % length) for position in positions], ids[:, : where[-1] + 1]
    plan = _schedule(model, ids, where[0], tokens_per_batch or _budget(model), share_prefix)
    names, found, computed = stream_names(model), None, 0
    for first, last, streams, tokens in _forwards(model, ids, where, plan):
        part = torch.stack([streams[name].to(model.device) for name in names], 2)
        if found is None:
            found = part.new_empty(len(ids), *part.shape[1:])
        found[first:last] = part
        computed += tokens
    assert found is not None
    values = np.empty(found.shape, dtype=np.float32)
    values[plan.order] = found.cpu().numpy()
    return Extracted(names, values[:, asked], computed)


@torch.no_grad()
def mean_embedding(model: Any, ids: Int[np.ndarray, "N T"]) -> Float[np.ndarray, "N D"]:
    """The mean of a prompt's token embeddings, fp32: what uniform attention without any weights could pass on."""
    rows = [model.embed(row[None])[0].float().mean(0) for row in torch.from_numpy(ids).to(model.device)]
    return torch.stack(rows).cpu().numpy()


def _schedule(model: Any, ids: np.ndarray, latest: int, budget: int, share_prefix: bool) -> Schedule:
    if not share_prefix or not isinstance(model, models.HybridLM):
        return whole(len(ids), ids.shape[1], budget)
    return schedule(ids, latest, budget, _launch(model), 1 if model.device.type == "cpu" else GPU_ALIGN)


def _budget(model: Any) -> int:
    if model.device.type == "cpu":
        return CPU_TOKENS
    token = model.embed(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return int(GPU_BYTES // (token.numel() * token.element_size()))


def _launch(model: models.HybridLM) -> float:
    """Tokens that cost as much as launching one forward: few for a large model."""
    if model.device.type == "cpu":
        return CPU_LAUNCH
    return GPU_LAUNCH / (2 * model.num_parameters(embeddings=False))


Batch = tuple[int, int, dict[str, torch.Tensor], int]


def _forwards(model: Any, ids: np.ndarray, where: Sequence[int], plan: Schedule) -> Iterator[Batch]:
    """Places first .. last - 1 of the plan's order, their streams, and the tokens forwarded for them."""
    rows = torch.from_numpy(ids[plan.order]).to(model.device)
    cache = models.Cache()
    for first, last, start in plan.batches:
        batch, behind = rows[first:last, start:], None
        ahead = start - cache.length
        if plan.trunk is not None:
            if ahead:
                model.final_hidden(rows[plan.trunk : plan.trunk + 1, cache.length : start], cache=cache)
            behind = cache.branch(last - first)
        with record_streams(model, [position - start for position in where]) as streams:
            if behind is None:
                model.final_hidden(batch)
            else:
                model.final_hidden(batch, cache=behind)
        yield first, last, streams, ahead + batch.numel()
