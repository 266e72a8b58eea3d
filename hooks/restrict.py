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
    `reach=R` instead of `window` gives R tokens to the group as a whole, split over its layers (`reach_windows`): the
    receptive fields of stacked layers add up, so n layers with a window of R each would reach n (R - 1) + 1. Nested
    restrictions intersect. On leaving, also by an exception, the model is what it was.

    Raises ValueError for an empty group, an unknown layer, both or none of window and reach, a window < 1, a reach
    that is too small for the group, and sinks on a recurrent path.
    """
    chosen = select(model, layers)
    windows = _windows(model, layers, chosen, window, reach)
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
        windows = [w for w in (window, _own_window(layer, path)) if w is not None]
        if not windows:
            return None
        step = min(windows) - 1 + _conv_tokens(layer, path)
        other = per_layer.get(layer.index, 0)
        per_layer[layer.index] = other + step if getattr(layer, "in_series", False) else max(other, step)
    return 1 + sum(per_layer.values())


def _layer_ids(layers: Sequence[int], n_layers: int) -> list[int]:
    ids = list(layers)
    for index in ids:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < n_layers:
            raise ValueError(f"layer {index!r} does not exist; layer ids are absolute, 0 to {n_layers - 1}.")
    return sorted(set(ids))


def reach_windows(model: Any, layers: str | Sequence[int], reach: int) -> list[int]:
    """The window of every path of the group (in layer order) that a total reach of R tokens leaves it.

        1 + sum over layers of (w_l - 1 + c_l - 1) = R,   c_l the width of the layer's convolution (1: none)

    The budget goes to the layers in equal parts, the remainder to the first ones; what a layer's own window cannot use
    goes to the others. Parallel paths of a layer share its part, paths in series take one each. So the group reaches R
    tokens exactly, or all it can if its own windows allow less (`group_reach`); information still may go round it,
    through layers that are not restricted. Raises ValueError if R is below what the convolutions alone reach.
    """
    chosen = select(model, layers)
    _check_size("reach", reach)
    stages: dict[tuple[int, int], list[int]] = {}  # what takes its own part of the budget: places in `chosen`
    for place, (layer, path) in enumerate(chosen):
        stages.setdefault((layer.index, path if getattr(layer, "in_series", False) else -1), []).append(place)
    own = [_own_window(*pair) for pair in chosen]
    convolution = [max(_conv_tokens(*chosen[place]) for place in places) for places in stages.values()]
    room = [
        None if any(own[place] is None for place in places) else max(own[place] or 1 for place in places) - 1
        for places in stages.values()
    ]
    if reach - 1 < sum(convolution):
        raise ValueError(
            f"reach is {reach}, but the convolutions of these layers alone reach {1 + sum(convolution)} tokens; "
            f"expected at least {1 + sum(convolution)}."
        )
    parts = _shared_out(reach - 1 - sum(convolution), room)
    windows = {place: 1 + part for places, part in zip(stages.values(), parts, strict=True) for place in places}
    return [windows[place] for place in range(len(chosen))]


def _shared_out(budget: int, room: Sequence[int | None]) -> list[int]:
    """`budget` in equal parts, none above its room (None: no bound); the remainder to the first that can take it."""
    parts = [0] * len(room)
    while budget:
        open_ = [i for i, limit in enumerate(room) if limit is None or parts[i] < limit]
        if not open_:
            break  # every own window is narrower: nothing is left to restrict
        share = max(1, budget // len(open_))
        for i in open_:
            limit = room[i]
            step = min(share, budget, share if limit is None else limit - parts[i])
            parts[i] += step
            budget -= step
    return parts


def _windows(
    model: Any, layers: str | Sequence[int], chosen: list[tuple[Any, int]], window: int | None, reach: int | None
) -> list[int]:
    if (window is None) == (reach is None):
        raise ValueError(f"restrict takes either window or reach; found window={window!r}, reach={reach!r}.")
    if reach is not None:
        return reach_windows(model, layers, reach)
    _check_size("window", window)
    return [int(window or 0)] * len(chosen)


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer >= 1 (tokens visible, self included).")


def _own_window(layer: Any, path: int) -> int | None:
    """The window that a path was built with; a path with sink tokens of its own sees them from anywhere: None."""
    window: int | None = layer.paths[path].window
    return None if getattr(layer.mixers[path], "sinks", 0) else window


def _conv_tokens(layer: Any, path: int) -> int:
    """Tokens that a path's short convolution adds to the window of its state."""
    return int(getattr(layer.mixers[path], "conv_width", 1)) - 1


def _check_sinks(chosen: list[tuple[Any, int]], sinks: int) -> None:
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        raise ValueError(f"sinks is {sinks!r}; expected an integer >= 0 (first tokens that stay visible).")
    if sinks:
        for layer, path in chosen:
            if (kind := layer.paths[path].kind) not in SOFTMAX_KINDS:
                raise ValueError(
                    f"layers.{layer.index} is {kind}; a recurrent state has no sink tokens. Use sinks=0 there."
                )
