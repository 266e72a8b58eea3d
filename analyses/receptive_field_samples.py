"""The per-sample values of a receptive-field study, joined from its units: documents, repeated n-grams, prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Float

import hooks
from analyses.conditions import Condition
from analyses.receptive_field_measures import BUCKETS
from analyses.result import Dataset, Variable
from probes import repeat_copy

PER_DOCUMENT = {
    "key_loss": "summed loss over the document's key tokens",
    "first_loss": "summed loss over the first token of each key interval",
    "paired_key_loss": "summed loss over the key tokens that have a partner",
    "paired_matched_loss": "summed loss over their partners",
    "matched_loss": "mean loss over matched non-key tokens (same evaluator log p, similar frequency)",
    "loss": "mean loss over all tokens but the first",
}


def collected(
    plan: Any, name: str, parts: dict[str, Dataset], part: str, variable: str, stretch: int = 1
) -> np.ndarray:
    """[condition, sample, ...]; NaN where a condition does not apply or was not measured at this length, a copy of
    "none" where it changes nothing."""
    rows: list[np.ndarray | None] = []
    for condition in plan.conditions[name]:
        source = Condition("none") if condition.changes_nothing(plan.layers[name]) else condition
        mine = plan.unit_ids_by_length.get((name, part, source, stretch))
        rows.append(np.concatenate([parts[unit][variable] for unit in mine]) if mine else None)
    shape = next(row.shape for row in rows if row is not None)
    return np.stack([np.full(shape, np.nan) if row is None else row for row in rows])


def conditions_coord(plan: Any, name: str) -> dict[str, Variable]:
    labels = [condition.label for condition in plan.conditions[name]]
    return {
        "condition": Variable(("condition",), labels, "", "what was restricted; -> w: w visible tokens, self included")
    }


def bound_coord() -> dict[str, Variable]:
    return {"bound": Variable(("bound",), ["low", "high"], "", "end of an interval")}


def document_values(plan: Any, name: str, parts: dict[str, Dataset], stretch: int = 1) -> Dataset:
    """Losses of every document under every condition, and how many tokens they are over."""
    encoded, context, trained = plan.encoded(name, stretch), plan.contexts[name], plan.trained[name]
    variables = {
        variable: Variable(
            ("condition", "document"), collected(plan, name, parts, "documents", variable, stretch), "nat", text
        )
        for variable, text in PER_DOCUMENT.items()
    }
    buckets = collected(plan, name, parts, "documents", "bucket_loss", stretch)
    variables["bucket_loss"] = Variable(
        ("condition", "document", "bucket"),
        buckets,
        "nat",
        "mean loss by position; NaN in a bucket without tokens; what lies beyond the training length is in the last",
    )
    for variable, values, text in (
        ("n_key", [len(e.key) for e in encoded], "key tokens in this model's tokens"),
        ("n_intervals", [len(e.first) for e in encoded], "key intervals that hold such a token"),
        ("n_pairs", [len(e.paired) for e in encoded], "key tokens with a partner"),
        ("n_matched", [len(e.matched) for e in encoded], "matched non-key tokens"),
        ("n_tokens", [e.own for e in encoded], "tokens of the document"),
        ("n_before", [e.start for e in encoded], "tokens of other texts in front of it, not measured"),
        ("extrapolation", [int(len(e.ids) > trained) for e in encoded], "1: longer than the training length"),
    ):
        variables[variable] = Variable(("document",), values, "1", text)
    coords = conditions_coord(plan, name) | {
        "document": Variable(("document",), [document.name for document in plan.documents], "", "document"),
        "bucket": Variable(
            ("bucket",), np.arange(BUCKETS) * context // BUCKETS, "token", "first position of the bucket"
        ),
    }
    return Dataset(variables, coords, "Losses in nats, per document")


def prompt_values(plan: Any, name: str, parts: dict[str, Dataset], stretch: int = 1) -> Dataset:
    """Scores of every needle prompt under every condition, and where its needle lies."""
    samples, trained = plan.samples(name, stretch), plan.trained[name]
    per_prompt = {
        "depth": ([sample.depth for sample in samples], "1", "needle position / prompt length"),
        "distance": ([s.answer_span[0] - s.value_span[0] for s in samples], "token", "from needle value to answer"),
        "length": ([len(sample.input_ids) for sample in samples], "token", "prompt with its answer"),
        "extrapolation": ([int(len(s.input_ids) > trained) for s in samples], "1", "1: beyond the training length"),
    }
    variables = {key: Variable(("prompt",), *values) for key, values in per_prompt.items()}
    for variable, text in (("correct", "1 if all digits are the argmax"), ("digits", "share of digits right")):
        values = collected(plan, name, parts, "prompts", variable, stretch)
        variables[variable] = Variable(("condition", "prompt"), values, "1", f"{text}, teacher-forced")
    return Dataset(variables, conditions_coord(plan, name), "Needle retrieval, per prompt")


def repeat_values(plan: Any, name: str, parts: dict[str, Dataset], stretch: int = 1) -> Dataset:
    """Losses on repeated n-grams by document and gap (probes.repeat_copy)."""
    edges = repeat_copy.gap_bins(plan.contexts[name])
    described = {
        "repeat_loss": "summed loss on second occurrences of rare n-grams, their first token left out",
        "repeat_first_loss": "summed loss of the same tokens at their first occurrences",
    }
    dims = ("condition", "document", "gap")
    variables = {
        variable: Variable(dims, collected(plan, name, parts, "documents", variable, stretch), "nat", text)
        for variable, text in described.items()
    }
    counts = [repeat_copy.by_gap(np.zeros(len(e.ids)), e.repeats, edges)[2] for e in plan.encoded(name, stretch)]
    variables["n_repeat"] = Variable(("document", "gap"), counts, "1", "tokens of second occurrences")
    coords = conditions_coord(plan, name) | gap_coord(edges)
    coords["document"] = Variable(("document",), [document.name for document in plan.documents], "", "document")
    return Dataset(variables, coords, "Repeat-copy losses, per document")


def gap_coord(edges: np.ndarray) -> dict[str, Variable]:
    text = "gaps above this many tokens, up to the next; the last bin has no end"
    return {"gap": Variable(("gap",), edges, "token", text)}


def seen_windows(plan: Any, name: str) -> Float[np.ndarray, " C"]:
    """Tokens that one restricted layer sees at most under each condition, self included; NaN: not restricted or n/a."""
    layers = plan.layers[name]
    return np.array([_seen(condition, layers) for condition in plan.conditions[name]])


def _seen(condition: Condition, layers: Any) -> float:
    if condition.group in ("none", "floor") or condition.not_applicable(layers):
        return float("nan")
    if condition.reach:
        return float(max(hooks.reach_windows(SimpleNamespace(layers=layers), condition.layers, condition.reach)))
    return float(condition.window)  # 0: means
