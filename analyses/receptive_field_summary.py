"""Joining the units of a receptive-field study: per-sample values, paired intervals, vacuous rows; the table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

import hooks
from analyses.bootstrap import interval, resampled_ratios
from analyses.conditions import Condition
from analyses.receptive_field_measures import BUCKETS
from analyses.result import Dataset, Result, Variable

VACUOUS = 1e-6
"""A relative change of every affected mixer's output up to this could not have mattered (fp32 rounding)."""
NOT_RUN = "identical to none: every own window is at most this one"


def join(plan: Any, parts: dict[str, Dataset]) -> Result:
    """Groups NAME (summary), NAME/documents, NAME/prompts, NAME/layers for every checkpoint."""
    groups: dict[str, Dataset] = {}
    for name in plan.paths:
        documents = _documents(plan, name, parts)
        prompts = _prompts(plan, name, parts)
        layers = _layers(plan, name, parts)
        groups[name] = _summary(plan, name, documents, prompts, layers)
        groups |= {f"{name}/documents": documents, f"{name}/prompts": prompts, f"{name}/layers": layers}
    return Result(groups, {"n_documents": len(plan.documents), "n_prompts": plan.n_prompts})


def _collected(plan: Any, name: str, parts: dict[str, Dataset], part: str, variable: str) -> np.ndarray:
    """[condition, sample, ...]; NaN where a condition does not apply, a copy of "none" where it changes nothing."""
    rows: list[np.ndarray | None] = []
    for condition in plan.conditions[name]:
        source = Condition("none") if condition.changes_nothing(plan.layers[name]) else condition
        mine = plan.unit_ids.get((name, part, source))
        rows.append(np.concatenate([parts[unit][variable] for unit in mine]) if mine else None)
    shape = next(row.shape for row in rows if row is not None)
    return np.stack([np.full(shape, np.nan) if row is None else row for row in rows])


def _conditions_coord(plan: Any, name: str) -> dict[str, Variable]:
    labels = [condition.label for condition in plan.conditions[name]]
    return {
        "condition": Variable(("condition",), labels, "", "what was restricted; -> w: w visible tokens, self included")
    }


def _documents(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    encoded, context = plan.encoded(name), plan.contexts[name]
    described = {
        "key_loss": "summed loss over the document's key tokens",
        "matched_loss": "mean loss over matched non-key tokens (same evaluator log p, similar frequency)",
        "loss": "mean loss over all tokens but the first",
    }
    variables = {
        variable: Variable(("condition", "document"), _collected(plan, name, parts, "documents", variable), "nat", text)
        for variable, text in described.items()
    }
    buckets = _collected(plan, name, parts, "documents", "bucket_loss")
    variables["bucket_loss"] = Variable(
        ("condition", "document", "bucket"),
        buckets,
        "nat",
        "mean loss by position; NaN in a bucket without tokens; what lies beyond the training length is in the last",
    )
    for variable, values, text in (
        ("n_key", [len(e.key) for e in encoded], "key tokens in this model's tokens"),
        ("n_matched", [len(e.matched) for e in encoded], "matched non-key tokens"),
        ("n_tokens", [len(e.ids) for e in encoded], "tokens of the document"),
        ("extrapolation", [int(len(e.ids) > context) for e in encoded], "1: longer than the training length"),
    ):
        variables[variable] = Variable(("document",), values, "1", text)
    coords = _conditions_coord(plan, name) | {
        "document": Variable(("document",), [document.name for document in plan.documents], "", "document"),
        "bucket": Variable(
            ("bucket",), np.arange(BUCKETS) * context // BUCKETS, "token", "first position of the bucket"
        ),
    }
    return Dataset(variables, coords, "Losses in nats, per document")


def _prompts(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    samples, context = plan.samples(name), plan.contexts[name]
    per_prompt = {
        "depth": ([sample.depth for sample in samples], "1", "needle position / prompt length"),
        "distance": ([s.answer_span[0] - s.value_span[0] for s in samples], "token", "from needle value to answer"),
        "length": ([len(sample.input_ids) for sample in samples], "token", "prompt with its answer"),
        "extrapolation": ([int(len(s.input_ids) > context) for s in samples], "1", "1: beyond the training length"),
    }
    variables = {key: Variable(("prompt",), *values) for key, values in per_prompt.items()}
    for variable, text in (("correct", "1 if all digits are the argmax"), ("digits", "share of digits right")):
        values = _collected(plan, name, parts, "prompts", variable)
        variables[variable] = Variable(("condition", "prompt"), values, "1", f"{text}, teacher-forced")
    return Dataset(variables, _conditions_coord(plan, name), "Needle retrieval, per prompt")


def _layers(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    layers, windows = plan.layers[name], plan.effect_windows(name)
    units = [plan.unit_ids[name, "effect", Condition("full", window=window)][0] for window in windows]
    effect = np.stack([parts[unit]["effect"] for unit in units])
    names = [document.name for document in plan.documents][: effect.shape[-1]]
    own = [np.nan if layer.window is None else layer.window for layer in layers]
    return Dataset(
        {
            "effect": Variable(
                ("window", "group", "layer", "document"), effect, "1",
                "||o - o_w|| / ||o|| of the mixer on its unrestricted input; NaN: no such path",
            ),
            "kind": Variable(("layer",), [layer.kind for layer in layers], "", "kind of the layer"),
            "own_window": Variable(("layer",), own, "token", "window the layer was built with; NaN: none"),
        },
        {
            "window": Variable(("window",), windows, "token", "visible tokens, self included"),
            "group": Variable(("group",), ["full", "efficient"], "", "restricted paths"),
            "layer": Variable(("layer",), np.arange(len(layers)), "1", "absolute layer id"),
            "document": Variable(("document",), names, "", "document"),
        },
        "Could the restriction have mattered? Measured, layer by layer",
    )  # fmt: skip


def _summary(plan: Any, name: str, documents: Dataset, prompts: Dataset, layers: Dataset) -> Dataset:
    conditions, seed = plan.conditions[name], plan.config.seed
    variables: dict[str, Variable] = {}

    def add(key: str, numerator: np.ndarray, weight: np.ndarray, units: str, text: str, change: str) -> None:
        for label, summed, words in (
            (key, numerator, text),
            (f"{key}_{change}", numerator - numerator[:1], f"{text}, minus that of none (paired)"),
        ):
            values, sampled = resampled_ratios(summed, weight, seed)
            variables[label] = Variable(("condition",), values, units, words)
            bounds = Variable(("condition", "bound"), interval(sampled), units, f"95 % bootstrap interval of {label}")
            variables[f"{label}_interval"] = bounds

    n_key, n_matched = documents["n_key"].astype(float), documents["n_matched"].astype(float)
    one = np.ones(len(n_key))
    add("log_long_ppl", documents["key_loss"], n_key, "nat", "log(LongPPL): mean loss over key tokens", "harm")
    matched = np.where(n_matched > 0, documents["matched_loss"] * n_matched, 0.0)
    add("matched_loss", matched, n_matched, "nat", "mean loss over matched non-key tokens", "harm")
    add("loss", documents["loss"], one, "nat", "mean loss over all tokens, documents weighted alike", "harm")
    correct = prompts["correct"]
    add("niah", correct, np.ones(correct.shape[1]), "1", "share of prompts with all digits right", "change")
    variables |= _described(conditions, plan.layers[name], layers)
    coords = _conditions_coord(plan, name) | {"bound": Variable(("bound",), ["low", "high"], "", "end of an interval")}
    return Dataset(
        variables, coords, "Intervals over documents (losses) and prompts (retrieval), not over training seeds"
    )


def _described(conditions: list[Condition], layers: Any, measured: Dataset) -> dict[str, Variable]:
    """What each condition is, how far it reaches, and whether it could have mattered."""
    effects = np.array([_largest_effect(condition, measured) for condition in conditions])
    vacuous = np.where(np.isnan(effects), np.nan, (effects <= VACUOUS).astype(float))
    vacuous[[condition.changes_nothing(layers) for condition in conditions]] = 1.0
    variables = {}
    for key, values, unit, text in (
        ("largest_effect", effects, "1", "largest effect of a restricted mixer, over the documents of `layers`"),
        ("vacuous", vacuous, "1", "1: no restricted mixer's output moved, so no harm could follow"),
        ("reach", [_reach(condition, layers) for condition in conditions], "token",
         "tokens the restricted group can cross at most, self included; NaN: no bound"),
        ("status", [_status(condition, layers) for condition in conditions], "", "empty: measured"),
    ):  # fmt: skip
        variables[key] = Variable(("condition",), values, unit, text)
    for field, unit, text in (
        ("group", "", "none, full, efficient, layer or floor"),
        ("window", "token", "visible tokens, self included; 0: no window"),
        ("sinks", "token", "first tokens that stay visible"),
        ("layer", "1", "absolute layer id; -1: a group of layers"),
        ("reach", "token", "budget split over the group's layers; 0: a window each"),
    ):
        values = [getattr(condition, field) for condition in conditions]
        variables[f"restricted_{field}"] = Variable(("condition",), values, unit, text)
    return variables


def _largest_effect(condition: Condition, layers: Dataset) -> float:
    if condition.group in ("none", "floor") or condition.sinks or condition.reach:
        return float("nan")  # the effect is measured without sinks
    effect = layers["effect"][list(layers["window"]).index(condition.window)]
    chosen = (
        effect[:, condition.layer]
        if condition.group == "layer"
        else effect[["full", "efficient"].index(condition.group)]
    )
    return float(np.nanmax(chosen)) if np.isfinite(chosen).any() else float("nan")


def _reach(condition: Condition, layers: Any) -> float:
    if condition.group in ("none", "floor") or condition.sinks or condition.not_applicable(layers):
        return float("nan")
    model = SimpleNamespace(layers=layers)
    if condition.reach:  # the budget is that of keys and states; convolutions add to it, own windows may lie below it
        convolutions = hooks.group_reach(model, condition.layers, 1)
        own = hooks.group_reach(model, condition.layers, None)
        budget = condition.reach + (convolutions or 1) - 1
        return float(budget if own is None else min(budget, own))
    reach = hooks.group_reach(model, condition.layers, condition.window)
    return float("nan") if reach is None else float(reach)


def _status(condition: Condition, layers: Any) -> str:
    if reason := condition.not_applicable(layers):
        return f"n/a: {reason}"
    return NOT_RUN if condition.changes_nothing(layers) else ""


COLUMNS = ("restriction", "log(LongPPL)", "harm [95 %]", "matched harm", "all tokens", "needles", "change [95 %]")
LEGEND = (
    "Losses in nats. harm, change: minus the unrestricted model [paired bootstrap over documents, over prompts; not\n"
    "over training seeds]. matched harm: on non-key tokens that the evaluator predicts as well as the key tokens.\n"
    "vacuous: no restricted layer's output moved. identical: no own window is wider, so nothing was computed."
)


def table(result: Result) -> str:
    """The summaries as text, one block a checkpoint; intervals in brackets, n/a where a condition does not apply."""
    names = [name for name in result.groups if name and "/" not in name]
    return "\n\n".join([*(_block(result, name) for name in names), LEGEND])


def _block(result: Result, name: str) -> str:
    group, documents, prompts = (result.groups[f"{name}{part}"] for part in ("", "/documents", "/prompts"))
    head = (
        f"{name}   n = {documents['n_key'].sum()} key tokens in {len(documents['n_key'])} documents, "
        f"{prompts['correct'].shape[1]} needle prompts of {prompts['length'][0]} tokens"
    )
    windows = set(group["restricted_window"][group["restricted_window"] > 0].tolist())
    if len(windows) == 1:
        head += f", {(prompts['distance'] >= min(windows)).sum()} of them with the needle beyond {min(windows)}"
    counts = {"documents": documents["extrapolation"].sum(), "prompts": prompts["extrapolation"].sum()}
    if beyond := [f"{count} {word}" for word, count in counts.items() if count]:
        head += f"\nextrapolation: {' and '.join(beyond)} longer than the training length"
    rows = [COLUMNS, *(_row(group, i) for i in range(len(group["condition"])))]
    widths = [max(len(row[column]) for row in rows if len(row) > column) for column in range(len(COLUMNS))]
    return "\n".join([head, *(_line(row, widths) for row in rows)])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
    return "  ".join([row[0].ljust(widths[0]), *cells, *row[len(widths) :]]).rstrip()


def _row(group: Dataset, i: int) -> tuple[str, ...]:
    """The cells of one condition and, where there is something to say, a note."""
    label, status = str(group["condition"][i]), str(group["status"][i])
    if status.startswith("n/a"):
        return (label, *[""] * (len(COLUMNS) - 1), status)
    note = "identical" if status == NOT_RUN else "vacuous" if group["vacuous"][i] == 1 else ""
    matched = "" if i == 0 else _number(group["matched_loss_harm"][i], "+.3f")
    return (
        label, _number(group["log_long_ppl"][i], ".3f"), _change(group, "log_long_ppl_harm", i, "+.3f"), matched,
        _number(group["loss"][i], ".3f"), _number(group["niah"][i], ".2f"), _change(group, "niah_change", i, "+.2f"),
        note,
    )  # fmt: skip


def _number(value: float, form: str) -> str:
    return "n/a" if np.isnan(value) else f"{value + 0.0:{form}}"


def _change(group: Dataset, key: str, i: int, form: str) -> str:
    if i == 0:
        return ""
    low, high = (_number(bound, form) for bound in group[f"{key}_interval"][i])
    interval_text = "[n/a]" if low == "n/a" else f"[{low}, {high}]"
    value = _number(group[key][i], form)
    return value if value == "n/a" else f"{value} {interval_text}"
