"""One forward, all heads: what the chosen positions attend to in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.retrieval.sites import Queries, Site, find_sites, reading


class Trace(NamedTuple):
    """float32 on the CPU, NaN where a layer has no such head or no weights; H is the most heads that a layer has.

    Heads of a layer are counted over its paths in their order. Weights of recurrent heads are |W_tj| / sum of |W_tj|.
    """

    mass: Float[Tensor, "B L H R N"]
    entropy: Float[Tensor, "B L H R"]
    """Nats."""
    normalised_entropy: Float[Tensor, "B L H R"]
    """Divided by the log of the number of keys this head can see (window and sinks counted); NaN where that is one."""
    largest: Int[Tensor, "B L H R"]
    """Position of the key with the largest weight; -1 where there is none."""
    sink_mass: Float[Tensor, "B L H R"]
    """Weight of learned sink logits; NaN where there are none."""
    softmax: tuple[tuple[bool, ...], ...]
    """[L][H]: True for heads of softmax attention."""


@torch.no_grad()
def trace(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    positions: Sequence[int],
    spans: Int[Tensor, "B N 2"] | None = None,
    recurrent: bool = True,
) -> Trace:
    """Attention of the queries at `positions` (negative ones count from the end) in one forward, without logits.

    Cost O(R T) per head beside the forward; no T x T matrix. Restrictions in force are counted in. `recurrent`: read
    recurrent layers too, one backward through their recurrence for every position. Raises ValueError for positions or
    spans outside the prompt, and for a layer that did not run.
    """
    queries = Queries(_checked_positions(positions, input_ids.shape[1]), _checked_spans(spans, input_ids))
    sites = find_sites(model, recurrent)
    with reading(sites, queries):
        model.final_hidden(input_ids)
    silent = [site for site in sites if site.found is None]
    if silent:
        raise ValueError(
            f"layer {silent[0].layer} ({silent[0].kind}) did not run; expected one forward through all layers."
        )
    return _assembled(model, sites, (len(input_ids), len(queries.positions), queries.spans.shape[1]))


def attention_mass(
    model: Any, input_ids: Int[Tensor, "B T"], spans: Int[Tensor, "B N 2"], positions: Sequence[int] = (-1,)
) -> Float[Tensor, "B L H R N"]:
    """Attention weight that the queries at `positions` put on each span [first, stop); see `trace`."""
    return trace(model, input_ids, positions, spans).mass


def attention_entropy(
    model: Any, input_ids: Int[Tensor, "B T"], positions: Sequence[int] = (-4, -3, -2, -1), normalised: bool = True
) -> Float[Tensor, "B L H R"]:
    """Entropy of the attention of the queries at `positions`, divided by the log of the visible keys or in nats."""
    found = trace(model, input_ids, positions)
    return found.normalised_entropy if normalised else found.entropy


def by_kv_group(
    table: Float[Tensor, "*B H"], n_kv_heads: int, n_heads: int, how: str = "mean"
) -> Float[Tensor, "*B G"]:
    """Query heads of a layer reduced to its kv groups by "mean" or "max"; columns beyond n_heads are left out."""
    if how not in ("mean", "max"):
        raise ValueError(f"how is {how!r}; expected 'mean' or 'max'.")
    if n_heads % n_kv_heads or n_heads > table.shape[-1]:
        raise ValueError(
            f"n_heads is {n_heads} for {n_kv_heads} kv heads and {table.shape[-1]} columns; "
            "expected a multiple of the kv heads, and no more than the columns."
        )
    grouped = table[..., :n_heads].unflatten(-1, (n_kv_heads, -1))
    return grouped.mean(-1) if how == "mean" else grouped.amax(-1)


def _assembled(model: Any, sites: Sequence[Site], shape: tuple[int, int, int]) -> Trace:
    """One copy from the device for each table."""
    batch, rows, n_spans = shape
    n_layers, heads = len(model.layers), max(sum(path.heads for path in layer.paths) for layer in model.layers)
    mass = torch.full((batch, n_layers, heads, rows, n_spans), torch.nan)
    h, normalised, sink = (torch.full((batch, n_layers, heads, rows), torch.nan) for _ in range(3))
    largest = torch.full((batch, n_layers, heads, rows), -1, dtype=torch.int64)
    softmax = torch.zeros(n_layers, heads, dtype=torch.bool)
    for index, table in enumerate((mass, h, normalised, largest, sink)):
        columns: list[int] = []
        values: list[Tensor] = []
        for site in sites:
            value: Tensor | None = None if site.found is None else site.found[index]
            if value is not None:
                columns += [site.layer * heads + site.first + n for n in range(site.heads)]
                values.append(value if not values else value.to(values[0].device))
        if values:
            table.flatten(1, 2)[:, columns] = torch.cat(values, 1).to("cpu", table.dtype)
    for site in sites:
        softmax[site.layer, site.first : site.first + site.heads] = site.softmax
    return Trace(mass, h, normalised, largest, sink, tuple(map(tuple, softmax.tolist())))


def _checked_positions(positions: Sequence[int], length: int) -> Int[Tensor, " R"]:
    if not len(positions) or min(positions) < -length or max(positions) >= length:
        raise ValueError(
            f"positions is {list(positions)[:8]} for {length} tokens; "
            f"expected at least one from {-length} to {length - 1}."
        )
    return torch.as_tensor([p % length for p in positions], dtype=torch.long)


def _checked_spans(spans: Tensor | None, input_ids: Tensor) -> Int[Tensor, "B N 2"]:
    batch, length = input_ids.shape
    if spans is None:
        return torch.zeros(batch, 0, 2, dtype=torch.long)
    if spans.ndim != 3 or spans.shape[0] != batch or spans.shape[2] != 2:
        raise ValueError(
            f"spans has shape {list(spans.shape)}; expected [B, N, 2] with B = {batch}: token ranges [first, stop)."
        )
    if spans.numel() and (
        int(spans.min()) < 0 or int(spans.max()) > length or bool((spans[..., 0] >= spans[..., 1]).any())
    ):
        raise ValueError(f"spans hold {spans.tolist()[:2]}; expected 0 <= first < stop <= {length} in each.")
    return spans
