"""What ablating heads does to needle accuracy: every head singly, the top ones against heads that were not chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analyses.bootstrap import interval, resampled_ratios
from analyses.result import Dataset, Variable
from analyses.retrieval_heads import Head

KS = (1, 2)
NONE, SINGLE, TOP, RANDOM = "none", "single", "top", "random"
MEASURES = {
    "correct": ("accuracy", "1", "share of prompts with all digits right, teacher-forced"),
    "loss": ("loss", "nat", "mean loss of the answer's tokens"),
}


def ablation_dataset(
    unablated: Dataset, singles: Sequence[Dataset], pairs: Dataset, followed: Sequence[Head], full: Sequence[Head],
    seed: int,
) -> Dataset:  # fmt: skip
    """Rows: nothing ablated, every head singly, the top two, random pairs of unselected full-attention heads.

    Changes are paired over prompts with 95 % bootstrap intervals. `comparison` holds, for k = 1 and 2, the top k
    against sets of k unselected full-attention heads (k = 1: all of them; k = 2: the random pairs).
    """
    stacked = {
        name: np.concatenate([unablated[name][None], *(part[name] for part in [*singles, pairs])])
        for name in ("correct", "digits", "loss")
    }
    heads = np.concatenate([np.full((1, 2, 2), -1), *(part["heads"] for part in [*singles, pairs])]).astype(int)
    n_single, n_pairs = sum(len(part["heads"]) for part in singles), len(pairs["heads"])
    kinds = [NONE, *[SINGLE] * n_single, *[TOP] * min(n_pairs, 1), *[RANDOM] * max(n_pairs - 1, 0)]
    variables = {
        "kind": Variable(("ablation",), kinds, "", "none, single, top or random"),
        "heads": Variable(("ablation", "member", "place"), heads, "1", "(layer, head) of each ablated head; -1: none"),
    }
    for name, (units, text) in {
        "correct": ("1", "1 if all digits are the argmax, teacher-forced"),
        "digits": ("1", "share of digits right"),
        "loss": ("nat", "mean loss of the answer's tokens"),
    }.items():
        variables[name] = Variable(("ablation", "prompt"), stacked[name], units, text)
    for name in MEASURES:
        variables |= _changes(stacked[name], name, seed)
    variables |= _comparisons(stacked, kinds, heads, followed, full, seed)
    coords = {
        "ablation": Variable(("ablation",), [_label(k, h) for k, h in zip(kinds, heads, strict=True)], "", "what"),
        "place": Variable(("place",), ["layer", "head"], "", "where a head is"),
        "k": Variable(("k",), list(KS), "1", "heads ablated together"),
        "bound": Variable(("bound",), ["low", "high"], "", "end of an interval"),
    }
    text = "Outputs of heads replaced by their means over the choosing prompts, at the last checkpoint"
    return Dataset(variables, coords, text)


def _label(kind: str, heads: np.ndarray) -> str:
    named = " + ".join(f"{layer}.{head}" for layer, head in heads if layer >= 0)
    return {NONE: NONE, SINGLE: named}.get(kind, f"{kind} {named}")


def _changes(values: np.ndarray, name: str, seed: int) -> dict[str, Variable]:
    label, units, text = MEASURES[name]
    one = np.ones(values.shape[1])
    change, sampled = resampled_ratios(values - values[:1], one, seed)
    dims = ("ablation",)
    return {
        label: Variable(dims, values.mean(1), units, text),
        f"{label}_change": Variable(dims, change, units, f"{text}, minus that of none (paired)"),
        f"{label}_change_interval": Variable(
            (*dims, "bound"), interval(sampled), units, f"95 % bootstrap interval of {label}_change, over prompts"
        ),
    }


def _comparisons(
    stacked: dict[str, np.ndarray], kinds: Sequence[str], heads: np.ndarray, followed: Sequence[Head],
    full: Sequence[Head], seed: int,
) -> dict[str, Variable]:  # fmt: skip
    """Top k minus the mean of the other sets, paired over prompts; NaN where either is missing."""
    singles = {tuple(int(n) for n in row[0]): i for i, row in enumerate(heads) if kinds[i] == SINGLE}
    rest = [singles[head] for head in full if head not in followed and head in singles]
    sets = {
        1: ([singles[head] for head in followed[:1] if head in singles], rest),
        2: ([i for i, kind in enumerate(kinds) if kind == TOP], [i for i, kind in enumerate(kinds) if kind == RANDOM]),
    }
    columns: dict[str, list[object]] = {name: [] for name in COMPARED}
    one = np.ones(stacked["correct"].shape[1])
    for k in KS:
        top, other = sets[k]
        columns["n_others"].append(len(other))
        for name, (label, _, _) in MEASURES.items():
            values = stacked[name] - stacked[name][:1]
            nan = np.full(values.shape[1], np.nan)
            rows = np.stack([values[top[0]] if top else nan, values[other].mean(0) if other else nan])
            mean, sampled = resampled_ratios(np.stack([*rows, rows[0] - rows[1]]), one, seed)
            bounds = interval(sampled)
            for index, part in enumerate(("top", "others", "difference")):
                columns[f"{part}_{label}_change"].append(mean[index])
                columns[f"{part}_{label}_change_interval"].append(bounds[index])
        harm = stacked["loss"].mean(1)
        worse = float((harm[other] >= harm[top[0]]).mean()) if top and other else np.nan
        columns["others_as_harmful"].append(worse)
    return {
        name: Variable(("k", "bound") if name.endswith("interval") else ("k",), np.array(values), *COMPARED[name])
        for name, values in columns.items()
    }


COMPARED = {
    "n_others": ("1", "sets of k full-attention heads that were not chosen (k = 1: all; k = 2: random pairs)"),
    "others_as_harmful": ("1", "share of those sets that raise the answer's loss at least as much as the top k"),
} | {
    f"{part}_{label}_change{end}": (units, f"{words} of {label}{note}")
    for part, words in (("top", "change by ablating the top k"), ("others", "mean change by ablating other sets"),
                        ("difference", "top k minus other sets, paired: change"))
    for label, units, _ in MEASURES.values()
    for end, note in (("", ""), ("_interval", ", 95 % bootstrap interval over prompts"))
}  # fmt: skip
