"""Attention knockout: chosen queries cannot see a span of tokens through chosen layers or heads, exactly.

Softmax: the span's keys are taken out of the softmax, which is renormalised over the rest (Geva et al. 2023,
arXiv:2304.14767). Recurrent: chosen queries read the state as it would be had the span's tokens not written into it
(k_s = 0, so that neither k_s v_s^T nor the delta rule's erasure happens; decays stay). A convolution of width c before
the state carries a token into the keys and values of the c - 1 behind it, so these do not write either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooks.restrict import SOFTMAX_KINDS, select

Head = tuple[int, int]
WRITES = {"rglru": "hook_v", "conv": "hook_v"}
"""Where zero means that nothing is written; hook_k in all other recurrent mixers."""


class Knockout(NamedTuple):
    """What a mixer must hide: tokens [first, stop) of each sample from the queries behind them, for some of its heads.

    `queries` are positions; None: all. Queries inside or before a span see what they always saw.
    """

    spans: Int[Tensor, "B 2"]
    queries: tuple[int, ...] | None
    heads: tuple[int, ...]

    def behind(self, at: Int[Tensor, " T"], length: int, spill: int = 0) -> Bool[Tensor, "B T"]:
        """Which of the positions `at` are queries of this knockout; `spill`: tokens that a convolution carries on."""
        behind = at[None] >= self.spans.to(at.device)[:, 1:] + spill
        if self.queries is None:
            return behind
        asked = torch.tensor([position % length for position in self.queries], device=at.device)
        return behind & torch.isin(at, asked)[None]

    def inside(self, at: Int[Tensor, " S"], spill: int = 0) -> Bool[Tensor, "B S"]:
        """Which of the positions belong to the span of each sample."""
        spans = self.spans.to(at.device)
        return (at[None] >= spans[:, :1]) & (at[None] < spans[:, 1:] + spill)


@contextmanager
def knockout(
    model: Any,
    spans: Int[Tensor, "B 2"],
    *,
    layers: str | Sequence[int] | None = None,
    heads: Iterable[Head] | None = None,
    queries: Sequence[int] | None = (-1,),
) -> Iterator[dict[int, int]]:
    """Inside, `queries` (None: every later token) do not see tokens spans[b] = [first, stop) through these paths.

    Give `layers` ("full", "efficient" or layer ids), or `heads` as (layer, head), counted over the layer's paths as in
    `ablate`. Cost: softmax O(R S) for R queries and no T x T matrix; recurrent layers run twice, and their hook points
    fire twice. Yields how often each layer ran. Raises ValueError for unknown layers and heads, spans that are no token
    ranges, other batches than that of the spans, a cache, a second knockout of one recurrent layer, and if a layer
    never ran.
    """
    _check_spans(spans)
    chosen = _paths(model, layers, heads)
    ran = dict.fromkeys(sorted({layer.index for layer, _, _ in chosen}), 0)
    asked = None if queries is None else tuple(int(position) for position in queries)
    with ExitStack() as stack:
        for layer, path, columns in chosen:
            wanted = Knockout(spans, asked, columns)
            softmax = layer.paths[path].kind in SOFTMAX_KINDS
            stack.enter_context((_hidden if softmax else _unwritten)(layer, layer.mixers[path], wanted))
        for index in ran:
            for site in model.layers[index].sites[:1]:
                handle = site.register_forward_pre_hook(partial(_count, ran, index))
                stack.callback(handle.remove)
        yield ran
    silent = [index for index, count in ran.items() if not count]
    if silent:
        raise ValueError(f"layers {silent} never ran, so the knockout did not act; run the model inside the block.")


def _count(ran: dict[int, int], index: int, module: Any, args: Any) -> None:
    ran[index] += 1


def _check_spans(spans: Any) -> None:
    right = isinstance(spans, Tensor) and spans.ndim == 2 and spans.shape[1] == 2 and not spans.is_floating_point()
    if not right or bool((spans[:, 0] >= spans[:, 1]).any()) or int(spans.min()) < 0:
        found = f"shape {list(spans.shape)}, {spans.tolist()[:2]}" if isinstance(spans, Tensor) else repr(spans)
        raise ValueError(f"spans are {found}; expected an integer tensor [B, 2] of token ranges, 0 <= first < stop.")


def _paths(
    model: Any, layers: str | Sequence[int] | None, heads: Iterable[Head] | None
) -> list[tuple[Any, int, tuple[int, ...]]]:
    """(layer, index of the path in it, columns of its heads)."""
    if (heads is None) == (layers is None):
        raise ValueError("a knockout needs either heads or layers; expected exactly one of the two.")
    if layers is not None:
        return [(layer, path, tuple(range(layer.paths[path].heads))) for layer, path in select(model, layers)]
    wanted = list(dict.fromkeys((int(layer), int(head)) for layer, head in heads or ()))
    if not wanted:
        raise ValueError("heads is empty; expected at least one (layer, head).")
    counts = {layer.index: layer.n_heads for layer in model.layers}
    unknown = [head for head in wanted if not 0 <= head[1] < counts.get(head[0], 0)]
    if unknown:
        raise ValueError(f"the model has no head {unknown[0]}; expected (layer, head) with heads per layer {counts}.")
    found: list[tuple[Any, int, tuple[int, ...]]] = []
    for layer, path in select(model, sorted({layer for layer, _ in wanted})):
        first = sum(other.heads for other in layer.paths[:path])
        columns = [
            h - first for index, h in wanted if index == layer.index and 0 <= h - first < layer.paths[path].heads
        ]
        found += [(layer, path, tuple(columns))] if columns else []
    return found


@contextmanager
def _hidden(layer: Any, mixer: Any, wanted: Knockout) -> Iterator[None]:
    """A softmax mixer takes the keys out itself, where it has them."""
    mixer.knockouts = (*mixer.knockouts, wanted)
    try:
        yield
    finally:
        mixer.knockouts = tuple(own for own in mixer.knockouts if own is not wanted)


@dataclass
class _Rerun:
    """The two runs of one recurrent mixer: without the span's writes, then as it is but for the chosen reads."""

    wanted: Knockout
    spill: int
    without: bool = True
    read: list[Tensor] = field(default_factory=list)

    def write(self, module: Any, args: Any, value: Tensor) -> Tensor | None:
        if not self.without:
            return None
        at = torch.arange(value.shape[1], device=value.device)
        inside = self.wanted.inside(at, self.spill)
        if len(inside) != len(value):
            raise ValueError(f"the spans are of {len(inside)} samples; expected {len(value)}, those of the batch.")
        return value.masked_fill(inside[:, :, None, None], 0)

    def out(self, module: Any, args: Any, value: Tensor) -> Tensor | None:
        if self.without:
            self.read[:] = [value]
            return None
        at, kept = torch.arange(value.shape[1], device=value.device), value.clone()
        later = self.wanted.behind(at, value.shape[1], self.spill)[:, :, None, None]
        columns, (read,) = list(self.wanted.heads), self.read
        kept[:, :, columns] = torch.where(later, read[:, :, columns], value[:, :, columns])
        return kept


@contextmanager
def _unwritten(layer: Any, mixer: Any, wanted: Knockout) -> Iterator[None]:
    kind = layer.paths[layer.mixers.index(mixer)].kind
    write = WRITES.get(kind, "hook_k")
    if not all(hasattr(mixer, name) for name in (write, "hook_recurrence_out")):
        raise ValueError(f"layers.{layer.index} ({kind}) has no {write} or hook_recurrence_out; choose other layers.")
    if getattr(mixer, "rerunning", False):
        raise ValueError(f"layers.{layer.index} ({kind}) has a knockout already; expected one at a time.")
    rerun = _Rerun(wanted, getattr(mixer, "conv_width", 1) - 1)

    def again(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not rerun.without:
            return None  # this is the second run
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values", "cache_params")) or len(args) > 2:
            raise ValueError(f"layers.{layer.index} continues a cache under a knockout; expected whole sequences.")
        rerun.without = False
        try:
            return module(*args, **kwargs)
        finally:
            rerun.without = True
            rerun.read.clear()

    site = layer.sites[0] if len(layer.sites) == 1 else mixer.site
    handles = [getattr(mixer, write).register_forward_hook(rerun.write),
               mixer.hook_recurrence_out.register_forward_hook(rerun.out),
               site.register_forward_hook(again, with_kwargs=True)]  # fmt: skip
    mixer.rerunning = True
    try:
        yield
    finally:
        mixer.rerunning = False
        for handle in handles:
            handle.remove()
