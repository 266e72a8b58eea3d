"""Sets of layers that a receptive-field study restricts by themselves: "5", "5,11,17"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analyses.conditions import Condition
from models.errors import InputError


def parse(given: Sequence[str], n_layers: int) -> list[tuple[int, ...]]:
    """Sorted absolute layer ids of each set. InputError for what is no id or not a layer of the model."""
    return [tuple(sorted({_layer(word, entry, n_layers) for word in entry.split(",")})) for entry in given]


def _layer(word: str, entry: str, n_layers: int) -> int:
    word = word.strip()
    if not (word.isascii() and word.isdigit()):
        raise InputError(f"--layers has {entry!r}; expected absolute layer ids joined by commas, e.g. 5 or 5,11")
    if int(word) >= n_layers:
        raise InputError(f"--layers has {entry!r}; expected layer ids 0 to {n_layers - 1} of a model of {n_layers}")
    return int(word)


def subset_conditions(
    subsets: Iterable[tuple[int, ...]], windows: Sequence[int], sinks: Sequence[int]
) -> list[Condition]:
    """Each set at each window with each number of sinks. A set of one layer is a "layer" condition."""
    return [
        Condition("layer", window=window, sinks=n, layer=ids[0])
        if len(ids) == 1
        else Condition("layers", window=window, sinks=n, subset=ids)
        for ids in subsets
        for window in windows
        for n in sinks
    ]
