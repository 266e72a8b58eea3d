"""The conditions of a receptive-field study: which paths see how many tokens, and where a condition does not apply."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import hooks

SOFTMAX = ("full", "swa")


@dataclass(frozen=True)
class Condition:
    """`group` is "none", "full", "efficient", "layer" or "floor"; `layer` an absolute id; window or reach in tokens."""

    group: str
    window: int = 0
    sinks: int = 0
    layer: int = -1
    reach: int = 0

    @property
    def label(self) -> str:
        """e.g. "none", "full -> 512", "full -> 512 + 4 sinks", "layer 3 -> 512", "full reach 512", "last 512 only"."""
        if self.group == "none":
            return "none"
        if self.group == "floor":
            return f"last {self.window} only"
        who = f"layer {self.layer}" if self.group == "layer" else self.group
        what = f"reach {self.reach}" if self.reach else f"-> {self.window}"
        return f"{who} {what}" + (f" + {self.sinks} sinks" if self.sinks else "")

    @property
    def layers(self) -> str | list[int]:
        """What hooks.restrict takes."""
        return [self.layer] if self.group == "layer" else self.group

    def applied(self, model: Any) -> AbstractContextManager[Any]:
        """The restriction as a context manager; none and floor leave the model as it is."""
        if self.group in ("none", "floor"):
            return nullcontext()
        size = {"reach": self.reach} if self.reach else {"window": self.window}
        return hooks.restrict(model, self.layers, sinks=self.sinks, **size)

    def not_applicable(self, layers: Sequence[Any]) -> str:
        """Why this condition means nothing for a model of these layers; empty if it applies."""
        if self.group in ("none", "floor"):
            return ""
        paths = self._paths(layers)
        if not paths:
            return f"no {self.group} path" if self.group != "layer" else f"layer {self.layer} has no mixer"
        if refusal := next((mixer.refusal for _, mixer in paths if hasattr(mixer, "refusal")), ""):
            return refusal
        if self.sinks and any(path.kind not in SOFTMAX for path, _ in paths):
            return "a recurrent state has no sinks"
        return ""

    def changes_nothing(self, layers: Sequence[Any]) -> bool:
        """True if every path's own band lies inside this one: the same computation as "none", whatever the weights.

        False where the condition does not apply. A path's own sinks beyond these would be hidden, so they count.
        """
        if self.group in ("none", "floor") or self.reach or self.not_applicable(layers):
            return False
        return all(
            path.window is not None and path.window <= self.window and getattr(mixer, "sinks", 0) <= self.sinks
            for path, mixer in self._paths(layers)
        )

    def _paths(self, layers: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The (path, mixer) pairs that are restricted."""
        if self.group == "layer":
            chosen = [layers[self.layer]] if 0 <= self.layer < len(layers) else []
            return [pair for layer in chosen for pair in zip(layer.paths, layer.mixers, strict=True)]
        pairs = [pair for layer in layers for pair in zip(layer.paths, layer.mixers, strict=True)]
        return [(path, mixer) for path, mixer in pairs if (path.kind == "full") == (self.group == "full")]


def build(
    windows: Sequence[int],
    sinks: Sequence[int],
    layer_windows: Sequence[int],
    n_layers: int,
    reaches: Sequence[int],
    floors: bool,
) -> list[Condition]:
    """Condition "none" first, then each group at each window with each number of sinks, single layers, reaches, floors.

    Values given twice count once.
    """
    found = [Condition("none")]
    for group in ("full", "efficient"):
        found += [Condition(group, window=w, sinks=s) for w in windows for s in sinks]
        found += [Condition(group, reach=r) for r in reaches]
    found += [Condition("layer", window=w, layer=layer) for w in layer_windows for layer in range(n_layers)]
    found += [Condition("floor", window=w) for w in windows if floors]
    return list(dict.fromkeys(found))
