"""The conditions of a receptive-field study: which paths see how many tokens, and where a condition does not apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hooks

SOFTMAX = ("full", "swa")


@dataclass(frozen=True)
class Condition:
    """`group` is "none", "full", "efficient", "layer", "layers" or "floor"; window or reach in tokens.

    `layer` is the absolute id of "layer", `subset` those of "layers" (analyses.layer_subsets).
    `ablated`: the group's mixers put out their means instead (analyses.mean_ablation).
    """

    group: str
    window: int = 0
    sinks: int = 0
    layer: int = -1
    reach: int = 0
    ablated: bool = False
    subset: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """e.g. "none", "full -> 512", "full -> 512 + 4 sinks", "layer 3 -> 512", "layers 3,5 -> 512", "full reach 512",
        "last 512 only"."""
        if self.group == "none":
            return "none"
        if self.group == "floor":
            return f"last {self.window} only"
        who = f"{self.group} {','.join(map(str, self.ids))}" if self.ids else self.group
        if self.ablated:
            return f"{who} -> mean"
        what = f"reach {self.reach}" if self.reach else f"-> {self.window}"
        return f"{who} {what}" + (f" + {self.sinks} sinks" if self.sinks else "")

    @property
    def ids(self) -> tuple[int, ...]:
        """Absolute layer ids; empty where a group of paths is meant."""
        return (self.layer,) if self.group == "layer" else self.subset

    @property
    def layers(self) -> str | list[int]:
        """What hooks.restrict takes."""
        return list(self.ids) if self.ids else self.group

    def applied(self, model: Any, means: Mapping[Any, Any] | None = None) -> AbstractContextManager[Any]:
        """The restriction as a context manager; none and floor leave the model as it is. `means`: hooks.head_means."""
        if self.group in ("none", "floor"):
            return nullcontext()
        if self.ablated:
            return hooks.ablate(model, layers=self.layers, how="mean", means=means)
        size = {"reach": self.reach} if self.reach else {"window": self.window}
        return hooks.restrict(model, self.layers, sinks=self.sinks, **size)

    def not_applicable(self, layers: Sequence[Any]) -> str:
        """Why this condition means nothing for a model of these layers; empty if it applies."""
        if self.group in ("none", "floor"):
            return ""
        paths = self._paths(layers)
        if not paths:
            return f"no mixer in {self.group} {','.join(map(str, self.ids))}" if self.ids else f"no {self.group} path"
        if refusal := next((mixer.refusal for _, mixer in paths if hasattr(mixer, "refusal")), ""):
            return refusal
        if self.sinks and any(path.kind not in SOFTMAX for path, _ in paths):
            return "a recurrent state has no sinks"
        if self.ablated and not all(hasattr(mixer, "hook_z") for _, mixer in paths):
            return "a mixer whose heads cannot be reached"
        return self._below_convolutions(layers) if self.reach else ""

    def _below_convolutions(self, layers: Sequence[Any]) -> str:
        least = hooks.group_reach(SimpleNamespace(layers=layers), self.layers, 1) or 1
        return f"its convolutions alone reach {least} tokens" if self.reach < least else ""

    def changes_nothing(self, layers: Sequence[Any]) -> bool:
        """True if every path's own band lies inside this one: the same computation as "none", whatever the weights.

        False where the condition does not apply. A path's own sinks beyond these would be hidden, so they count.
        """
        if self.group in ("none", "floor") or self.reach or self.ablated or self.not_applicable(layers):
            return False
        return all(
            path.window is not None and path.window <= self.window and getattr(mixer, "sinks", 0) <= self.sinks
            for path, mixer in self._paths(layers)
        )

    def _paths(self, layers: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The (path, mixer) pairs that are restricted."""
        if self.ids:
            chosen = [layers[index] for index in self.ids if 0 <= index < len(layers)]
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
    ablated: bool = False,
) -> list[Condition]:
    """Condition "none" first, then each group at each window with each number of sinks, its reaches and, if asked, its
    means; single layers; floors.

    Values given twice count once.
    """
    found = [Condition("none")]
    for group in ("full", "efficient"):
        found += [Condition(group, window=w, sinks=s) for w in windows for s in sinks]
        found += [Condition(group, reach=r) for r in reaches]
        found += [Condition(group, ablated=True)] if ablated else []
    found += [Condition("layer", window=w, layer=layer) for w in layer_windows for layer in range(n_layers)]
    found += [Condition("floor", window=w) for w in windows if floors]
    return list(dict.fromkeys(found))
