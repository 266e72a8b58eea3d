"""Joining the units of a receptive-field study: its groups, what each condition is, whether it could have mattered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

import hooks
from analyses.conditions import Condition
from analyses.receptive_field_lengths import by_length, repeats_summary, summarised_all
from analyses.receptive_field_metrics import NEEDLES, needles_by_distance
from analyses.receptive_field_samples import (
    bound_coord,
    conditions_coord,
    document_values,
    prompt_values,
    repeat_values,
    seen_windows,
)
from analyses.result import Dataset, Result, Variable
from probes.long_ppl import COVARIATES

VACUOUS = 1e-6
"""A relative change of every affected mixer's output up to this could not have mattered (fp32 rounding)."""
NOT_RUN = "identical to none: every own window is at most this one"


def join(plan: Any, parts: dict[str, Dataset]) -> Result:
    """Groups NAME (summary) and NAME/{documents, prompts, layers, matching, needles, repeats, repeats/documents} for
    every checkpoint; with several lengths also NAME/lengths (analyses.receptive_field_lengths)."""
    groups: dict[str, Dataset] = {}
    for name in plan.paths:
        documents, prompts = document_values(plan, name, parts), prompt_values(plan, name, parts)
        repeats, layers = repeat_values(plan, name, parts), _layers(plan, name, parts)
        described = _described(plan.conditions[name], plan.layers[name], layers)
        groups |= {
            name: _summary(plan, name, documents, prompts, repeats, described),
            f"{name}/documents": documents,
            f"{name}/prompts": prompts,
            f"{name}/layers": layers,
            f"{name}/matching": _matching(plan, name),
            f"{name}/needles": _needles(plan, name, prompts, described["reach"].values),
            f"{name}/repeats": repeats_summary(plan, name, repeats),
            f"{name}/repeats/documents": repeats,
        }
        groups |= by_length(plan, name, parts)
    attributes: dict[str, Any] = {"n_documents": len(plan.documents), "n_prompts": plan.n_prompts}
    attributes["margin"] = plan.config.margin  # nats
    if plan.ablate:  # tokens under the means of each checkpoint, in their order
        attributes["n_calibration_tokens"] = [sum(row.size for row in plan.calibration_tokens(n)) for n in plan.paths]
    return Result(groups, attributes)


def _needles(plan: Any, name: str, prompts: Dataset, reaches: np.ndarray) -> Dataset:
    windows = seen_windows(plan, name)
    coords = conditions_coord(plan, name) | bound_coord()
    coords["needle"] = Variable(("needle",), list(NEEDLES), "", "where it lies for one restricted layer, for the group")
    variables = needles_by_distance(prompts, windows, reaches)
    return Dataset(variables, coords, "Needle retrieval inside and outside of what the restricted group can cross")


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


def _summary(
    plan: Any, name: str, documents: Dataset, prompts: Dataset, repeats: Dataset, described: dict[str, Variable]
) -> Dataset:
    variables = summarised_all(plan, name, documents, prompts, repeats)
    variables |= described
    coords = conditions_coord(plan, name) | bound_coord()
    return Dataset(
        variables, coords, "Intervals over documents (losses) and prompts (retrieval), not over training seeds"
    )


def _matching(plan: Any, name: str) -> Dataset:
    found = plan.matching(name)
    values = {
        "before": (found.before, "standardised difference of key tokens and all that could be partners"),
        "after": (found.after, "standardised difference of key tokens and their partners"),
        "key_mean": (found.key_means, "mean over paired key tokens (nats, log of 1 + count, share of the text)"),
        "matched_mean": (found.matched_means, "mean over their partners"),
    }
    return Dataset(
        {key: Variable(("covariate",), array, "1", text) for key, (array, text) in values.items()},
        {"covariate": Variable(("covariate",), list(COVARIATES), "", "what partners are alike in")},
        "Balance of key tokens and matched non-key tokens; differences in standard deviations, below 0.1 is balanced",
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
         "tokens the restricted group can cross at most, self included; 0: means; NaN: no bound"),
        ("status", [_status(condition, layers) for condition in conditions], "", "empty: measured"),
    ):  # fmt: skip
        variables[key] = Variable(("condition",), values, unit, text)
    for field, unit, text in (
        ("group", "", "none, full, efficient, layer, layers or floor"),
        ("window", "token", "visible tokens, self included; 0: no window"),
        ("sinks", "token", "first tokens that stay visible"),
        ("layer", "1", "absolute layer id; -1: several layers"),
        ("ids", "", "absolute layer ids, joined by commas; empty: a group of paths"),
        ("reach", "token", "budget split over the group's layers; 0: a window each"),
        ("ablated", "1", "1: the group's mixers put out their means"),
    ):
        values = [_stored(getattr(condition, field)) for condition in conditions]
        variables[f"restricted_{field}"] = Variable(("condition",), values, unit, text)
    return variables


def _stored(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return int(value) if isinstance(value, bool) else value


def _largest_effect(condition: Condition, layers: Dataset) -> float:
    if condition.group in ("none", "floor") or condition.sinks or condition.reach or condition.ablated:
        return float("nan")  # the effect is measured without sinks, at a window each
    effect = layers["effect"][list(layers["window"]).index(condition.window)]
    chosen = effect[:, list(condition.ids)] if condition.ids else effect[["full", "efficient"].index(condition.group)]
    return float(np.nanmax(chosen)) if np.isfinite(chosen).any() else float("nan")


def _reach(condition: Condition, layers: Any) -> float:
    if condition.group in ("none", "floor") or condition.sinks or condition.not_applicable(layers):
        return float("nan")
    if condition.ablated:
        return 0.0
    model = SimpleNamespace(layers=layers)
    if condition.reach:  # own windows may lie below it
        own = hooks.group_reach(model, condition.layers, None)
        return float(condition.reach if own is None else min(condition.reach, own))
    reach = hooks.group_reach(model, condition.layers, condition.window)
    return float("nan") if reach is None else float(reach)


def _status(condition: Condition, layers: Any) -> str:
    if reason := condition.not_applicable(layers):
        return f"n/a: {reason}"
    return NOT_RUN if condition.changes_nothing(layers) else ""
