"""Every metric of a receptive-field study at the training length and at multiples of it, and the summary of one length.

The same documents with the same key tokens and repeats stand behind (m - 1) T tokens of other texts, so that only their
positions change; needle prompts are m times as long. Beyond T a model extrapolates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from analyses.receptive_field_metrics import metrics, repeats_beyond, repeats_by_gap, summarised
from analyses.receptive_field_samples import (
    bound_coord,
    conditions_coord,
    document_values,
    gap_coord,
    prompt_values,
    repeat_values,
    seen_windows,
)
from analyses.result import Dataset, Variable


def summarised_all(plan: Any, name: str, documents: Dataset, prompts: Dataset, repeats: Dataset) -> dict[str, Variable]:
    """[condition] values, changes, intervals and verdicts of all metrics of one length."""
    seed, margin = plan.config.seed, plan.config.margin
    variables: dict[str, Variable] = {}
    for metric in metrics(documents, prompts):
        variables |= summarised(metric, seed, margin)
    return variables | repeats_beyond(repeats, seen_windows(plan, name), seed, margin)


def repeats_summary(plan: Any, name: str, repeats: Dataset) -> Dataset:
    coords = conditions_coord(plan, name) | bound_coord() | gap_coord(repeats["gap"])
    words = "Repeat-copy: loss on rare n-grams by the gap to their first occurrence; intervals over documents"
    return Dataset(repeats_by_gap(repeats, plan.config.seed), coords, words)


def by_length(plan: Any, name: str, parts: dict[str, Dataset]) -> dict[str, Dataset]:
    """Groups NAME/lengths, NAME/lengths/{documents, prompts, repeats, repeats/documents}; none with one length only."""
    if len(plan.lengths) == 1:
        return {}
    samples = [
        (
            document_values(plan, name, parts, m),
            prompt_values(plan, name, parts, m),
            repeat_values(plan, name, parts, m),
        )
        for m in plan.lengths
    ]
    summaries = [Dataset(summarised_all(plan, name, *three)) for three in samples]
    beyond = [int(any(three[i]["extrapolation"].any() for i in (0, 1))) for three in samples]
    coords = conditions_coord(plan, name) | bound_coord()
    tokens = np.array(plan.lengths) * plan.contexts[name]
    coords["context"] = Variable(("context",), tokens, "token", "a multiple of the training length")
    described = {
        "multiple": Variable(("context",), list(plan.lengths), "1", "of the training length"),
        "extrapolation": Variable(("context",), beyond, "1", "1: some sample is longer than the training length"),
    }
    repeats = [repeats_summary(plan, name, three[2]) for three in samples]
    return {
        f"{name}/lengths": _stacked(summaries, coords, "All metrics by length", described),
        f"{name}/lengths/documents": _stacked([three[0] for three in samples], coords, "Losses, per document"),
        f"{name}/lengths/prompts": _stacked([three[1] for three in samples], coords, "Needle retrieval, per prompt"),
        f"{name}/lengths/repeats": _stacked(repeats, coords, "Repeat-copy by length"),
        f"{name}/lengths/repeats/documents": _stacked(
            [three[2] for three in samples], coords, "The same, per document"
        ),
    }


def _stacked(
    datasets: Sequence[Dataset], coords: dict[str, Variable], text: str, more: dict[str, Variable] | None = None
) -> Dataset:
    """One dataset with a first dimension "context" in front of every variable."""
    first = datasets[0]
    variables = {
        key: Variable(
            ("context", *variable.dims), np.stack([one[key] for one in datasets]), variable.units, variable.description
        )
        for key, variable in first.variables.items()
    }
    own = {dim: coord for dim, coord in first.coords.items() if dim not in coords}
    used = {"context", *(dim for variable in variables.values() for dim in variable.dims)}
    return Dataset({**variables, **(more or {})}, {**own, **{d: c for d, c in coords.items() if d in used}}, text)
