"""Receptive-field restriction: chosen layers see only their last `window` tokens, exactly, softmax or recurrent.

Softmax mixers mask keys; recurrent mixers make the state at t from tokens t-w+1..t only (never by subtracting states).
The window of a recurrent layer is that of its state: a short convolution of width c before it adds c - 1 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hooks.restriction import Restriction

SOFTMAX_KINDS = ("full", "swa")


@contextmanager
def restrict(
    model: Any,
    layers: str | Sequence[int],
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> Iterator[Any]:
    """Inside, the mixers of `layers` see the last `window` tokens (self included) and the first `sinks` tokens.

    `layers`: "full" or "efficient" (all paths of that group), or absolute layer ids (every path of those layers).
    `reach=R` instead of `window` splits the budget over the group's n layers, so that together they reach R tokens:
    sum of (w_l - 1) = R - 1. Nested restrictions intersect. On leaving, also by an exception, the model is what it was.

    Raises ValueError for an empty group, an unknown layer, window or reach < 1, and sinks on a recurrent path.
    """
    chosen = select(model, layers)
    windows = _windows(chosen, window, reach)
    _check_sinks(chosen, sinks)
    added = []
    try:
        for (layer, path), own in zip(chosen, windows, strict=True):
            mixer = layer.mixers[path]
            restriction = Restriction(own, sinks)
            mixer.restrictions = (*mixer.restrictions, restriction)
            added.append((mixer, restriction))
        yield model
    finally:
        for mixer, restriction in added:
            mixer.restrictions = tuple(r for r in mixer.restrictions if r is not restriction)


def select(model: Any, layers: str | Sequence[int]) -> list[tuple[Any, int]]:
    """The (layer, index of the path in it) pairs that `layers` names, in layer order."""
    described = model.layers
    if isinstance(layers, str):
        if layers not in ("full", "efficient"):
            raise ValueError(f"layers is {layers!r}; expected 'full', 'efficient' or a list of layer ids.")
        chosen = [
            (layer, index) for layer in described for index, path in enumerate(layer.paths)
            if (path.kind == "full") == (layers == "full")
        ]  # fmt: skip
        if not chosen:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in described))
            raise ValueError(f"the model has no {layers} path (its layers: {kinds}); choose layers by id instead.")
    else:
        chosen = [(described[i], p) for i in _layer_ids(layers, len(described)) for p in range(len(described[i].paths))]
        if not chosen:
            raise ValueError("layers is empty; expected 'full', 'efficient' or at least one layer id.")
    for layer, path in chosen:
        mixer = layer.mixers[path]
        if not hasattr(mixer, "restrictions"):
            default = f"layers.{layer.index} ({layer.paths[path].kind}) cannot be restricted."
            raise ValueError(getattr(mixer, "refusal", default))
    return chosen


def group_reach(model: Any, layers: str | Sequence[int], window: int | None) -> int | None:
    """Tokens (self included) that information can cross through these layers alone; None without a bound.

    1 + the sum over layers of (w_l - 1), w_l the smaller of `window` and the path's own; a convolution adds c - 1.
    Of parallel paths the longer one counts, of paths in series both. A path with sink tokens of its own sees them from
    anywhere: only `window` bounds it.
    """
    per_layer: dict[int, int] = {}
    for layer, path in select(model, layers):
        own = None if getattr(layer.mixers[path], "sinks", 0) else layer.paths[path].window
        windows = [w for w in (window, own) if w is not None]
        if not windows:
            return None
        step = min(windows) - 1 + getattr(layer.mixers[path], "conv_width", 1) - 1
        other = per_layer.get(layer.index, 0)
        per_layer[layer.index] = other + step if getattr(layer, "in_series", False) else max(other, step)
    return 1 + sum(per_layer.values())


def _layer_ids(layers: Sequence[int], n_layers: int) -> list[int]:
    ids = list(layers)
    for index in ids:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < n_layers:
            raise ValueError(f"layer {index!r} does not exist; layer ids are absolute, 0 to {n_layers - 1}.")
    return sorted(set(ids))


def _windows(chosen: list[tuple[Any, int]], window: int | None, reach: int | None) -> list[int]:
    if (window is None) == (reach is None):
        raise ValueError(f"restrict takes either window or reach; found window={window!r}, reach={reach!r}.")
    name, value = ("window", window) if reach is None else ("reach", reach)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer >= 1 (tokens visible, self included).")
    if reach is None:
        return [value] * len(chosen)
    ids = sorted({layer.index for layer, _ in chosen})
    share, rest = divmod(value - 1, len(ids))
    per_layer = {index: 1 + share + (rank < rest) for rank, index in enumerate(ids)}
    return [per_layer[layer.index] for layer, _ in chosen]


def _check_sinks(chosen: list[tuple[Any, int]], sinks: int) -> None:
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        raise ValueError(f"sinks is {sinks!r}; expected an integer >= 0 (first tokens that stay visible).")
    if sinks:
        for layer, path in chosen:
            if (kind := layer.paths[path].kind) not in SOFTMAX_KINDS:
                raise ValueError(
                    f"layers.{layer.index} is {kind}; a recurrent state has no sink tokens. Use sinks=0 there."
                )
