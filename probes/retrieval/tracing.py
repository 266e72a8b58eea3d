"""One forward, all heads: what the chosen positions attend to in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.retrieval.rows import attention_rows, entropy, normalised_entropy, span_mass

SOFTMAX = ("full", "swa")
RECURRENT = ("lightning", "mamba2", "gdn")


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
    length = input_ids.shape[1]
    where = _checked_positions(positions, length)
    spans = _checked_spans(spans, input_ids)
    sites = list(_sites(model, recurrent))
    with _captured(sites, where, spans):
        model.final_hidden(input_ids)
    silent = [site for site in sites if site.found is None]
    if silent:
        raise ValueError(
            f"layer {silent[0].layer} ({silent[0].kind}) did not run; expected one forward through all layers."
        )
    return _assembled(model, sites, input_ids.shape[0], len(where), spans.shape[1])


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


@dataclass
class _Site:
    """One path of one layer, its first column among the layer's heads, and what was read there."""

    layer: int
    kind: str
    heads: int
    first: int
    mixer: Any
    seen: dict[str, Tensor] = field(default_factory=dict)
    found: tuple[Tensor, ...] | None = None

    def points(self) -> tuple[str, ...]:
        """Hook points in the order in which they fire; the last completes what is needed."""
        if self.kind in SOFTMAX:
            return ("rot_q", "rot_k") if getattr(self.mixer, "rope_base", None) is not None else ("q", "k")
        return {
            "lightning": ("q", "k", "log_decay"),
            "mamba2": ("k", "q", "beta", "log_decay"),
            "gdn": ("q", "k", "beta", "log_decay"),
        }[self.kind]

    def read(self, where: Tensor, spans: Tensor) -> None:
        if self.kind in SOFTMAX:
            query, key = (self.seen[name] for name in self.points())
            rows = attention_rows(
                query, key, where, bands=self.mixer.bands(), sink_logits=getattr(self.mixer, "sink_logits", None)
            )
            p, visible, sink = rows.p, rows.visible.sum(-1), rows.sink_mass
        else:
            w = self.mixer.effective_rows(where, **self.seen).abs()
            p = w / w.sum(-1, keepdim=True)
            visible = torch.clamp(where + 1, max=self.mixer.state_window or int(where.max()) + 1).to(p.device)
            sink = None
        h = entropy(p)
        none = torch.full_like(h, torch.nan)
        self.found = (
            span_mass(p, spans), h, normalised_entropy(h, visible), p.argmax(-1), none if sink is None else sink
        )  # fmt: skip
        self.seen.clear()


def _sites(model: Any, recurrent: bool) -> Iterator[_Site]:
    for layer in model.layers:
        first = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if path.kind in SOFTMAX or (recurrent and path.kind in RECURRENT):
                yield _Site(layer.index, path.kind, path.heads, first, mixer)
            first += path.heads


@contextmanager
def _captured(sites: Sequence[_Site], where: Tensor, spans: Tensor) -> Iterator[None]:
    """Inside, each site reads its rows as soon as its operands have appeared: one layer's keys are held at a time."""
    handles = []

    def keeper(site: _Site, name: str, last: bool) -> Callable[..., None]:
        def keep(module: Any, args: Any, value: Tensor) -> None:
            rows_only = site.kind in SOFTMAX and name in ("q", "rot_q")
            site.seen[name] = value.detach()[:, where.to(value.device)] if rows_only else value.detach()
            if last:
                site.read(where, spans)

        return keep

    try:
        for site in sites:
            names = site.points()
            for name in names:
                point = getattr(site.mixer, f"hook_{name}")
                handles.append(point.register_forward_hook(keeper(site, name, name == names[-1])))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _assembled(model: Any, sites: Sequence[_Site], batch: int, rows: int, n_spans: int) -> Trace:
    n_layers, heads = len(model.layers), max(sum(path.heads for path in layer.paths) for layer in model.layers)
    shape = (batch, n_layers, heads, rows)
    mass = torch.full((*shape, n_spans), torch.nan)
    h, normalised, sink = (torch.full(shape, torch.nan) for _ in range(3))
    largest = torch.full(shape, -1, dtype=torch.int64)
    softmax = [[False] * heads for _ in range(n_layers)]
    for site in sites:
        assert site.found is not None
        columns = slice(site.first, site.first + site.heads)
        for table, values in zip((mass, h, normalised, largest, sink), site.found, strict=True):
            table[:, site.layer, columns] = values.to("cpu", table.dtype)
        softmax[site.layer][columns] = [site.kind in SOFTMAX] * site.heads
    return Trace(mass, h, normalised, largest, sink, tuple(map(tuple, softmax)))


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
        return torch.zeros(batch, 0, 2, dtype=torch.long, device=input_ids.device)
    if spans.ndim != 3 or spans.shape[0] != batch or spans.shape[2] != 2:
        raise ValueError(
            f"spans has shape {list(spans.shape)}; expected [B, N, 2] with B = {batch}: token ranges [first, stop)."
        )
    if spans.numel() and (
        int(spans.min()) < 0 or int(spans.max()) > length or bool((spans[..., 0] >= spans[..., 1]).any())
    ):
        raise ValueError(f"spans hold {spans.tolist()[:2]}; expected 0 <= first < stop <= {length} in each.")
    return spans
