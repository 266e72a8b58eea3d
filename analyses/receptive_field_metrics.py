"""What the per-sample values of a receptive-field study say together: values, paired changes, intervals, verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from analyses.bootstrap import LEVEL, interval, resampled_ratios
from analyses.equivalence import expanded_interval, verdicts
from analyses.result import Dataset, Variable
from probes.layerwise.intervals import wilson

JUDGED = "matters, equivalent or undecided against --margin, by the expanded interval (analyses.equivalence)"


@dataclass(frozen=True)
class Metric:
    """sum numerator / sum weight over samples, and minus that of the first condition: NAME and NAME_`change`."""

    name: str
    numerator: Float[np.ndarray, "C N"]
    weight: Float[np.ndarray, " N"]
    units: str
    text: str
    change: str = "harm"
    judged: bool = False


def metrics(documents: Dataset, prompts: Dataset) -> Iterator[Metric]:
    """All of one length. Documents weigh by the tokens that are counted, in `loss` alike."""
    n_key, n_first, n_pairs, n_matched = (
        documents[name].astype(float) for name in ("n_key", "n_intervals", "n_pairs", "n_matched")
    )
    key = documents["key_loss"]
    yield Metric("log_long_ppl", key, n_key, "nat", "log(LongPPL): mean loss over key tokens", judged=True)
    yield Metric(
        "first_loss", documents["first_loss"], n_first, "nat", "mean loss over the first token of each key interval",
        judged=True,
    )  # fmt: skip
    yield Metric("interval_loss", key, n_first, "nat", "mean over key intervals of the summed loss of their tokens")
    matched = np.where(n_matched > 0, documents["matched_loss"] * n_matched, 0.0)
    yield Metric("matched_loss", matched, n_matched, "nat", "mean loss over matched non-key tokens")
    apart = documents["paired_key_loss"] - documents["paired_matched_loss"]
    yield Metric(
        "excess", apart, n_pairs, "nat", "mean over matched pairs of the key token's loss minus its partner's",
        judged=True,
    )  # fmt: skip
    one = np.ones(len(n_key))
    yield Metric("loss", documents["loss"], one, "nat", "mean loss over all tokens, documents weighted alike")
    correct = prompts["correct"]
    yield Metric(
        "niah", correct, np.ones(correct.shape[1]), "1", "share of prompts with all digits right", change="change"
    )


def summarised(metric: Metric, seed: int, margin: float) -> dict[str, Variable]:
    """NAME, its change, both intervals, and the verdict on the change if the metric is judged."""
    found: dict[str, Variable] = {}
    changed = f"{metric.name}_{metric.change}"
    for label, summed, words in (
        (metric.name, metric.numerator, metric.text),
        (changed, metric.numerator - metric.numerator[:1], f"{metric.text}, minus that of none (paired)"),
    ):
        values, sampled = resampled_ratios(summed, metric.weight, seed)
        found[label] = Variable(("condition",), values, metric.units, words)
        bounds = Variable(
            ("condition", "bound"), interval(sampled), metric.units, f"95 % bootstrap interval of {label}"
        )
        found[f"{label}_interval"] = bounds
        if metric.judged and label == changed:
            expanded = expanded_interval(sampled, int(np.count_nonzero(metric.weight)))
            found[f"{label}_verdict"] = judged(values, expanded, margin, label)
    return found


def judged(values: Any, expanded: Any, margin: float, label: str) -> Variable:
    """Of every condition but the first, which the others are compared with."""
    words = f"{label}: {JUDGED}; empty: not measured, or none itself"
    return Variable(("condition",), ["", *verdicts(values[1:], expanded[1:], margin)], "", words)


def repeats_by_gap(documents: Dataset, seed: int) -> dict[str, Variable]:
    """[condition, gap]: loss of repeated n-grams at their second and first occurrence, and harm at the second."""
    weight = documents["n_repeat"].astype(float)
    second, first = documents["repeat_loss"], documents["repeat_first_loss"]
    found: dict[str, Variable] = {}
    for name, values, text in (
        ("repeat_loss", second, "mean loss on second occurrences of rare n-grams, their first token left out"),
        ("repeat_first_loss", first, "mean loss of the same tokens at their first occurrences"),
        ("repeat_gain", first - second, "first minus second: what copying gains"),
        ("repeat_harm", second - second[:1], "loss on second occurrences, minus that of none (paired)"),
    ):
        bins = [resampled_ratios(values[:, :, g], weight[:, g], seed) for g in range(weight.shape[1])]
        found[name] = Variable(("condition", "gap"), np.stack([value for value, _ in bins], axis=1), "nat", text)
        bounds = np.stack([interval(sampled) for _, sampled in bins], axis=1)
        words = f"95 % bootstrap interval of {name}"
        found[f"{name}_interval"] = Variable(("condition", "gap", "bound"), bounds, "nat", words)
    found["n_repeats"] = Variable(("gap",), weight.sum(axis=0).astype(np.int64), "1", "tokens, over documents")
    return found


def repeats_beyond(
    documents: Dataset, windows: Float[np.ndarray, " C"], seed: int, margin: float
) -> dict[str, Variable]:
    """Harm on repeats that lie beyond what one restricted layer sees, [condition]; NaN without a window.

    Whole bins of gaps: those whose edge is at least the window.
    """
    harm, count, edges = documents["repeat_loss"], documents["n_repeat"].astype(float), documents["gap"]
    n = len(windows)
    values, bounds, expanded = np.full(n, np.nan), np.full((n, 2), np.nan), np.full((n, 2), np.nan)
    tokens = np.zeros(n, dtype=np.int64)
    for row in np.flatnonzero(np.isfinite(windows)):
        beyond = edges >= windows[row]
        summed = (harm[row] - harm[0])[:, beyond].sum(axis=1)
        weight = count[:, beyond].sum(axis=1)
        ratio, sampled = resampled_ratios(summed[None], weight, seed)
        values[row], bounds[row], tokens[row] = ratio[0], interval(sampled)[0], int(weight.sum())
        expanded[row] = expanded_interval(sampled, int(np.count_nonzero(weight)))[0]
    name, text = (
        "repeat_beyond_harm",
        "loss on second occurrences whose first lies beyond the window, minus that of none",
    )
    return {
        name: Variable(("condition",), values, "nat", text),
        f"{name}_interval": Variable(("condition", "bound"), bounds, "nat", f"95 % bootstrap interval of {name}"),
        f"{name}_verdict": judged(values, expanded, margin, name),
        "n_repeats_beyond": Variable(("condition",), tokens, "1", "tokens in it"),
    }


NEEDLES = ("within the window", "within the reach", "beyond the reach")


def needles_by_distance(
    prompts: Dataset, windows: Float[np.ndarray, " C"], reaches: Float[np.ndarray, " C"]
) -> dict[str, Variable]:
    """[condition, needle]: share of prompts with all digits right, by where the needle lies for the restricted group.

    A needle at distance d (from its value to the answer) is seen by one layer up to d = window, can be relayed by the
    group alone up to d = reach, and beyond needs other layers. NaN without a window; an unbounded reach has no beyond.
    Wilson intervals, as a share of few prompts is often 0 or 1.
    """
    distance, correct = prompts["distance"], prompts["correct"]
    shares, bounds = np.full((len(windows), 3), np.nan), np.full((len(windows), 3, 2), np.nan)
    counts = np.zeros((len(windows), 3), dtype=np.int64)
    for row in np.flatnonzero(np.isfinite(windows)):
        reach = np.inf if np.isnan(reaches[row]) else reaches[row]
        place = np.where(distance <= windows[row], 0, np.where(distance <= reach, 1, 2))
        for needle in range(3):
            chosen = correct[row, place == needle]
            counts[row, needle] = len(chosen)
            if len(chosen):
                shares[row, needle] = chosen.mean()
                bounds[row, needle] = wilson(shares[row, needle][None], len(chosen), LEVEL)[0]
    dims, name = ("condition", "needle"), "niah_by_distance"
    return {
        name: Variable(dims, shares, "1", "share of prompts with all digits right, by where the needle lies"),
        f"{name}_interval": Variable((*dims, "bound"), bounds, "1", f"95 % Wilson interval of {name}"),
        "n_needles": Variable(dims, counts, "1", "prompts in it"),
    }
