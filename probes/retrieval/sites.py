"""Where the rows of a layer are read while it runs: at the hook points of its mixers.

A softmax mixer fires hook_rot_q then hook_rot_k (hook_q, hook_k where its `rope_base` is None), says by `bands()` what
is visible, and may have `scale`, `softcap` and `sink_logits`; a recurrent one has `effective_rows` and `state_window`.
What is read stays on the model's device until the forward has ended: a layer that waited for a copy would leave the
device idle while the next layer is being prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.retrieval.rows import attention_rows, entropy, inside_spans, log_count, visible_keys, weight_inside

SOFTMAX = ("full", "swa")
RECURRENT = ("lightning", "mamba2", "gdn")


class Read(NamedTuple):
    """Of the heads of one path, on the model's device."""

    mass: Float[Tensor, "B H R N"]
    entropy: Float[Tensor, "B H R"]
    normalised_entropy: Float[Tensor, "B H R"]
    largest: Int[Tensor, "B H R"]
    sink_mass: Float[Tensor, "B H R"] | None


class Queries:
    """The chosen positions and the spans, with what follows from them for a device, a length and a set of bands.

    Each is made once for all layers: a copy from the CPU waits for the device.
    """

    def __init__(self, positions: Int[Tensor, " R"], spans: Int[Tensor, "B N 2"]):
        self.positions, self.spans = positions.cpu(), spans.cpu()
        self._made: dict[Any, Any] = {}

    def at(self, device: torch.device) -> Int[Tensor, " R"]:
        return self._once(("at", device), lambda: self.positions.to(device))

    def visible(self, device: torch.device, n_keys: int, bands: Sequence[Any]) -> Bool[Tensor, "R S"]:
        key = ("visible", device, n_keys, *map(tuple, bands))
        return self._once(key, lambda: visible_keys(self.positions, n_keys, bands).to(device))

    def log_visible(
        self, like: Tensor, n_keys: int, bands: Sequence[Any] = (), window: int | None = None
    ) -> Float[Tensor, " R"]:
        """Log of the number of keys that each query sees, `window` at most; NaN for one."""
        key = ("log", like.device, like.dtype, n_keys, window, *map(tuple, bands))

        def make() -> Tensor:
            counts = visible_keys(self.positions, n_keys, bands).sum(-1)
            return log_count(counts.clamp(max=window or n_keys)).to(like)

        return self._once(key, make)

    def inside(self, like: Tensor) -> Float[Tensor, "B N S"]:
        n_keys = like.shape[-1]
        return self._once(
            ("inside", like.device, like.dtype, n_keys), lambda: inside_spans(self.spans, n_keys).to(like)
        )

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass
class Site:
    """One path of one layer, its first column among the layer's heads, and what was read there."""

    layer: int
    kind: str
    heads: int
    first: int
    mixer: Any
    seen: dict[str, Tensor] = field(default_factory=dict)
    found: Read | None = None

    @property
    def softmax(self) -> bool:
        return self.kind in SOFTMAX

    def points(self) -> tuple[str, ...]:
        """Hook points in the order in which they fire; the last completes what is needed."""
        if self.softmax:
            return ("rot_q", "rot_k") if getattr(self.mixer, "rope_base", None) is not None else ("q", "k")
        return {
            "lightning": ("q", "k", "log_decay"),
            "mamba2": ("k", "q", "beta", "log_decay"),
            "gdn": ("q", "k", "beta", "log_decay"),
        }[self.kind]

    def keep(self, name: str, value: Tensor, queries: Queries) -> None:
        """Take one operand, and read the rows when it is the last: one layer's keys are held at a time."""
        first, last = self.points()[0], self.points()[-1]
        rows_only = self.softmax and name == first
        self.seen[name] = value.detach()[:, queries.at(value.device)] if rows_only else value.detach()
        if name != last:
            return
        if self.softmax:
            self._read(self.seen[first], self.seen[last], queries)
        else:
            w = self.mixer.effective_rows(queries.positions, **self.seen).abs()
            p = w / w.sum(-1, keepdim=True)
            self._measure(p, queries.log_visible(p, p.shape[-1], window=self.mixer.state_window), queries)
        self.seen.clear()

    def _read(self, query: Float[Tensor, "B R H K"], key: Float[Tensor, "B S G K"], queries: Queries) -> None:
        bands = self.mixer.bands()
        visible = queries.visible(key.device, key.shape[1], bands)
        scale, softcap, sinks = (getattr(self.mixer, name, None) for name in ("scale", "softcap", "sink_logits"))
        rows = attention_rows(
            query, key, queries.positions, visible=visible, scale=scale, softcap=softcap, sink_logits=sinks
        )
        self._measure(rows.p, queries.log_visible(rows.p, key.shape[1], bands), queries, rows.sink_mass)

    def _measure(self, p: Tensor, log_visible: Tensor, queries: Queries, sink_mass: Tensor | None = None) -> None:
        h = entropy(p)
        self.found = Read(weight_inside(p, queries.inside(p)), h, h / log_visible, p.argmax(-1), sink_mass)


def find_sites(model: Any, recurrent: bool) -> list[Site]:
    """All paths of softmax attention and, if asked for, those of a recurrence."""
    kinds = (*SOFTMAX, *RECURRENT) if recurrent else SOFTMAX
    found = []
    for layer in model.layers:
        first = 0
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            if path.kind in kinds:
                found.append(Site(layer.index, path.kind, path.heads, first, mixer))
            first += path.heads
    return found


@contextmanager
def reading(sites: Sequence[Site], queries: Queries) -> Iterator[None]:
    """Inside, a forward of the model fills the sites."""
    handles = []

    def keeper(site: Site, name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, value: Tensor) -> None:
            site.keep(name, value, queries)

        return keep

    try:
        for site in sites:
            for name in site.points():
                handles.append(getattr(site.mixer, f"hook_{name}").register_forward_hook(keeper(site, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
