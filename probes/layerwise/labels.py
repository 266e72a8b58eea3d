"""Labels as codes, the split by prompt, and the shuffled-label control.

One split serves all features: whole prompts go to one side, stratified by label. With one row a prompt it is
scikit-learn's train_test_split(test_size=..., random_state=seed, stratify=labels), row for row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.model_selection import train_test_split

_SHUFFLE_STREAM = 1  # keeps the shuffled labels apart from the split, which uses the same seed


@dataclass(frozen=True, eq=False)
class Codes:
    """`values[codes[i]]` is entry i. Values are sorted where they can be compared, else in order of appearance."""

    values: tuple[Hashable, ...]
    codes: Int[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class Design:
    """What every feature is fitted to: labels, prompts, and which rows are held out."""

    classes: tuple[Hashable, ...]
    label: Int[np.ndarray, " N"]
    prompt: Int[np.ndarray, " N"]
    test: Bool[np.ndarray, " N"]
    stratified: bool

    @property
    def train_label(self) -> Int[np.ndarray, " N"]:
        return self.label[~self.test]

    @property
    def frequencies(self) -> Float[np.ndarray, " classes"]:
        """Share of each class in the training part."""
        return np.bincount(self.train_label, minlength=len(self.classes)) / len(self.train_label)


def encode(entries: Iterable[Any], what: str, *, sort: bool) -> Codes:
    """Codes of hashable entries (an array or tensor counts as its Python scalars); `what` names them in errors."""
    listed = entries.tolist() if hasattr(entries, "tolist") else list(entries)
    if not isinstance(listed, list):
        raise ValueError(f"{what} is the single value {listed!r}; expected one entry for each row of the features")
    try:
        values = list(dict.fromkeys(listed))
    except TypeError as error:
        raise ValueError(
            f"{what} hold entries that are not hashable ({error}); expected one label a row, such as an int or a str"
        ) from error
    if any(value != value for value in values):
        raise ValueError(f"{what} hold NaN, which equals no label; leave those rows out of features and {what}")
    if sort:
        with suppress(TypeError):  # mixed types have no order; only the order of columns depends on it
            values = sorted(values)
    index = {value: i for i, value in enumerate(values)}
    return Codes(tuple(values), np.asarray([index[entry] for entry in listed], dtype=np.int64))


def design(
    labels: Iterable[Any], groups: Iterable[Any] | None, n: int, *, test_size: float, seed: int, shuffled: bool
) -> Design:
    """Checks labels and groups against the n rows of the features, splits, and shuffles if asked to."""
    label = encode(labels, "labels", sort=True)
    # rows without groups are prompts of their own, even if two of them should be equal
    prompt = np.arange(n) if groups is None else encode(groups, "groups", sort=False).codes
    for what, codes in (("labels", label.codes), ("groups", prompt)):
        if len(codes) != n:
            raise ValueError(f"{what} have {len(codes)} entries, the features {n} rows; expected one entry a row")
    if len(label.values) < 2:
        raise ValueError(
            f"labels hold {len(label.values)} class(es): {list(label.values)}; expected at least 2, since no feature "
            "can tell one class from nothing"
        )
    test, stratified = split_by_prompt(label, prompt, test_size, seed)
    found = Design(label.values, label.codes, prompt, test, stratified)
    return Design(label.values, _shuffle(found, seed), prompt, test, stratified) if shuffled else found


def split_by_prompt(
    label: Codes, prompt: Int[np.ndarray, " N"], test_size: float, seed: int
) -> tuple[Bool[np.ndarray, " N"], bool]:
    """Which rows are held out, and whether the split is stratified.

    Stratified by the prompts' labels if all rows of a prompt share one; prompts with several labels have no stratum of
    their own and are split plainly. ValueError if a class would be missing on the training side.
    """
    first = np.unique(prompt, return_index=True)[1]
    n_prompts, pure = len(first), bool((label.codes == label.codes[first][prompt]).all())
    stratum = label.codes[first] if pure else None
    n_test = math.ceil(test_size * n_prompts)
    if not 0 < n_test < n_prompts:
        raise ValueError(f"{n_prompts} prompts at test_size {test_size} leave one side empty; pass more prompts")
    if stratum is not None:
        _check_strata(label, stratum, n_test, test_size)
    held_out = train_test_split(np.arange(n_prompts), test_size=test_size, random_state=seed, stratify=stratum)[1]
    test = np.isin(prompt, held_out)
    missing = sorted(set(range(len(label.values))) - set(label.codes[~test].tolist()))
    if missing:
        raise ValueError(
            f"the training part holds no row of class {label.values[missing[0]]!r} ({np.count_nonzero(~test)} rows, "
            f"{len(label.values)} classes); pass more prompts, a smaller test_size or another seed"
        )
    return test, pure


def _check_strata(label: Codes, stratum: np.ndarray, n_test: int, test_size: float) -> None:
    counts = np.bincount(stratum, minlength=len(label.values))
    if counts.min() < 2:
        name = label.values[int(counts.argmin())]
        raise ValueError(
            f"class {name!r} has {counts.min()} prompt; expected at least 2, one to train on and one to hold out; "
            "leave the class out or add prompts"
        )
    for side, size in (("test", n_test), ("training", len(stratum) - n_test)):
        if size < len(counts):
            raise ValueError(
                f"the {side} part has {size} prompts for {len(counts)} classes ({len(stratum)} prompts at test_size "
                f"{test_size}); expected at least one of each class; pass more prompts or another test_size"
            )


def _shuffle(found: Design, seed: int) -> np.ndarray:
    """Labels permuted among the training prompts, and separately among the test prompts.

    Both sides, because features that fall into clusters are answered cluster by cluster: with true test labels a probe
    trained on noise is right on whole classes or on none, so its accuracy spreads far beyond a binomial interval round
    chance. Each side on its own keeps the class frequencies of both. Prompts that have as many rows swap their labels
    as one, so that rows of a prompt stay as alike as they were; else rows are permuted.
    """
    rng = np.random.default_rng([_SHUFFLE_STREAM, seed])
    label = found.label.copy()
    for side in (found.test, ~found.test):
        members = np.flatnonzero(side)
        members = members[np.argsort(found.prompt[members], kind="stable")]
        sizes = np.unique(found.prompt[members], return_counts=True)[1]
        rows = members.reshape(-1, sizes[0] if (sizes == sizes[0]).all() else 1)  # [prompts, rows of a prompt]
        label[rows] = found.label[rows[rng.permutation(len(rows))]]
    return label
