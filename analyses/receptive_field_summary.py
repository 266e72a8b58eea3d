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
    layers, units = plan.layers[name], plan.units().values()
    rows: list[np.ndarray | None] = []
    for condition in plan.conditions[name]:
        source = Condition("none") if condition.changes_nothing(layers) else condition
        mine = [u for u in units if (u.checkpoint, u.part, u.condition) == (name, part, source)]
        rows.append(np.concatenate([parts[u.id][variable] for u in mine]) if mine else None)
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
        ("condition", "document", "bucket"), buckets, "nat", "mean loss by position; NaN in a bucket without tokens"
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
    samples = list(plan.prompts[name])
    per_prompt = {
        "depth": ([sample.depth for sample in samples], "1", "needle position / prompt length"),
        "distance": ([s.answer_span[0] - s.value_span[0] for s in samples], "token", "from needle value to answer"),
        "length": ([len(sample.input_ids) for sample in samples], "token", "prompt with its answer"),
    }
    variables = {key: Variable(("prompt",), *values) for key, values in per_prompt.items()}
    for variable, text in (("correct", "1 if all digits are the argmax"), ("digits", "share of digits right")):
        values = _collected(plan, name, parts, "prompts", variable)
        variables[variable] = Variable(("condition", "prompt"), values, "1", f"{text}, teacher-forced")
    return Dataset(variables, _conditions_coord(plan, name), "Needle retrieval, per prompt")


def _layers(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    layers, windows = plan.layers[name], plan.effect_windows(name)
    units = {u.condition.window: u.id for u in plan.units().values() if (u.checkpoint, u.part) == (name, "effect")}
    effect = np.stack([parts[units[window]]["effect"] for window in windows])
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
        ratio, draws = resampled_ratios(numerator, weight, seed)
        for label, values, sampled, words in (
            (key, ratio, draws, text),
            (f"{key}_{change}", ratio - ratio[0], draws - draws[:, :1], f"{text}, minus that of none (paired)"),
        ):
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
    effects = np.array([_largest_effect(condition, layers) for condition in conditions])
    vacuous = np.where(np.isnan(effects), np.nan, (effects <= VACUOUS).astype(float))
    variables |= {
        "largest_effect": Variable(("condition",), effects, "1", "largest effect of a restricted mixer, over documents"),
        "vacuous": Variable(("condition",), vacuous, "1", "1: no restricted mixer's output moved, so no harm could follow"),
        "reach": Variable(("condition",), [_reach(c, plan.layers[name]) for c in conditions], "token",
                          "tokens the restricted group can cross, self included; NaN: no bound"),
        "status": Variable(("condition",), [_status(c, plan.layers[name]) for c in conditions], "", "empty: measured"),
    }  # fmt: skip
    for field in ("group", "window", "sinks", "layer"):
        values = [getattr(condition, field) for condition in conditions]
        variables[f"restricted_{field}"] = Variable(("condition",), values, "" if field == "group" else "1", field)
    coords = _conditions_coord(plan, name) | {"bound": Variable(("bound",), ["low", "high"], "", "end of an interval")}
    return Dataset(
        variables, coords, "Intervals over documents (losses) and prompts (retrieval), not over training seeds"
    )


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
    if condition.reach:
        return float(condition.reach)
    model = SimpleNamespace(layers=layers)
    reach = hooks.group_reach(model, condition.layers, condition.window)
    return float("nan") if reach is None else float(reach)


def _status(condition: Condition, layers: Any) -> str:
    if reason := condition.not_applicable(layers):
        return f"n/a: {reason}"
    return NOT_RUN if condition.changes_nothing(layers) else ""


def table(result: Result) -> str:
    """The summaries as text, one block a checkpoint; intervals in brackets, n/a where a condition does not apply."""
    blocks = []
    for name, group in result.groups.items():
        if "/" in name or not name:
            continue
        documents, prompts = result.groups[f"{name}/documents"], result.groups[f"{name}/prompts"]
        head = (
            f"{name}   n = {documents['n_key'].sum()} key tokens in {len(documents['n_key'])} documents, "
            f"{prompts['correct'].shape[1]} needle prompts of {prompts['length'][0]} tokens"
        )
        columns = f"{'restriction':26} {'log(LongPPL)':>12} {'harm [95 %]':>22} {'all tokens':>11} {'needles':>8} {'change [95 %]':>22}"
        blocks.append("\n".join([head, columns, *(_row(group, i) for i in range(len(group["condition"])))]))
    return "\n\n".join(blocks)


def _row(group: Dataset, i: int) -> str:
    label, status = str(group["condition"][i]), str(group["status"][i])
    if status.startswith("n/a"):
        return f"{label:26} {status}"
    note = "  vacuous" if group["vacuous"][i] == 1 else ""
    return (
        f"{label:26} {group['log_long_ppl'][i]:12.3f} {_change(group, 'log_long_ppl_harm', i, 3):>22} "
        f"{_number(group['loss'][i], 3):>11} {_number(group['niah'][i], 2):>8} {_change(group, 'niah_change', i, 2):>22}{note}"
    )


def _number(value: float, digits: int) -> str:
    return "n/a" if np.isnan(value) else f"{value:.{digits}f}"


def _change(group: Dataset, key: str, i: int, digits: int) -> str:
    if i == 0 or np.isnan(group[key][i]):
        return ""
    low, high = group[f"{key}_interval"][i]
    return f"{group[key][i]:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
