"""Joining the fits of a scaling-law study, and its table."""

from __future__ import annotations

from typing import Any

import numpy as np

from analyses.bootstrap import interval
from analyses.result import Dataset, Result, Variable

JOINT = "joint"
EARLY = "loss of a checkpoint whose learning rate has not decayed is not that of a run of that length; see --last"
CORRELATED = "checkpoints of one run share their noise: intervals are too narrow; see --over runs"


def join(plan: Any, parts: dict[str, Dataset]) -> Result:
    """A group for each architecture, its fits stacked along `fit`, and the groups joint/LAW."""
    groups: dict[str, Dataset] = {}
    for name in plan.architectures:
        groups[name] = _architecture(plan, name, parts)
    for unit in plan.units.values():
        if unit.architecture == JOINT:
            groups[f"{JOINT}/{unit.law}"] = _joint(plan, parts[unit.id], unit.law)
    notes = [EARLY] if plan.from_runs and not plan.config.last else []
    if plan.from_runs and not plan.config.last and plan.config.over != "runs":
        notes.append(CORRELATED)
    attributes = {"level": plan.config.level, "bootstrap_over": plan.config.over, "notes": "\n".join(notes)}
    return Result(groups, attributes)


def _architecture(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    units = [unit for unit in plan.units.values() if unit.architecture == name]
    stored = [parts[unit.id] for unit in units]
    variables = {}
    for key, first in stored[0].variables.items():
        values = np.stack([_values(dataset, key, first) for dataset in stored])
        variables[key] = Variable(("fit", *first.dims), values, first.units, first.description)
    ends = np.stack([interval(draws, plan.config.level) for draws in variables["bootstrap"].values])
    text = f"{plan.config.level:.0%} percentile interval of bootstrap"
    variables["bootstrap_interval"] = Variable(("fit", "parameter", "bound"), ends, "1", text)
    for key, chosen in (("law", [unit.law for unit in units]), ("split", [_split(unit) for unit in units])):
        variables[key] = Variable(("fit",), chosen, "", {"law": "which law or preset", "split": "points fitted"}[key])
    points = plan.of(name)
    for key, of_points, unit, text in (
        ("n", points.n, "parameter", "N, parameters without embeddings"),
        ("d", points.d, "token", "D, training tokens"),
        ("loss", points.loss, "nat", "L"),
        ("scale", points.scale, "", "label of the size"),
        ("run", points.run, "", "label of the run; empty: not given"),
    ):
        variables[key] = Variable(("point",), of_points, unit, text)
    coords = {
        "fit": Variable(("fit",), [unit.label for unit in units], "", "law, and points that were fitted"),
        "bound": Variable(("bound",), ["low", "high"], "", "end of an interval"),
        **stored[0].coords,
    }
    return Dataset(variables, coords, "Intervals over the points given, not over other training seeds or larger models")


def _values(dataset: Dataset, key: str, like: Variable) -> np.ndarray:
    """A variable of one fit; NaN where that fit has none (the released fit has no intervals)."""
    return dataset[key] if key in dataset.variables else np.full(like.values.shape, np.nan)


def _split(unit: Any) -> str:
    return "held out" if unit.held_out else "all"


def _joint(plan: Any, dataset: Dataset, law: str) -> Dataset:
    points = plan.points
    variables = dict(dataset.variables)
    for key, values, unit in (("n", points.n, "parameter"), ("d", points.d, "token"), ("loss", points.loss, "nat")):
        variables[key] = Variable(("point",), values, unit, "as in the group of its architecture")
    variables["point_architecture"] = Variable(("point",), points.architecture, "", "architecture of the point")
    return Dataset(variables, dataset.coords, f"Architectures together, {law}; tests against the free law")


COLUMNS = ("fit", "n", "a", "b", "alpha", "profile", "bootstrap", "beta", "profile", "bootstrap", "c", "R2", "held out")
JOINT_COLUMNS = ("law", "parameters", "statistic", "p", "AICc", "BIC")


def table(result: Result) -> str:
    """One block an architecture, with what the points leave open below each fit; then the joint laws."""
    names = [name for name in result.groups if name.split("/")[0] != JOINT]
    blocks = [_block(result, name) for name in names]
    blocks += [_joint_block(result, name) for name in result.groups if name.split("/")[0] == JOINT and "/" in name]
    blocks += [f"note: {line}" for line in str(result.attributes["notes"]).splitlines()]
    return "\n\n".join([*blocks, _legend(result)])


def _block(result: Result, name: str) -> str:
    group = result.groups[name]
    sizes = len(np.unique(group["n"]))
    head = (
        f"{name}   {len(group['n'])} points, {sizes} sizes N = {group['n'].min():.4g} .. {group['n'].max():.4g}, "
        f"D = {group['d'].min():.4g} .. {group['d'].max():.4g} tokens, L = {group['loss'].min():.3f} .. "
        f"{group['loss'].max():.3f} nats"
    )
    if len(rows := np.flatnonzero(group["split"] == "held out")):
        out = ~group["fitted"][rows[0]]
        labels = ", ".join(dict.fromkeys(group["scale"][out].tolist()))
        head += f"\nheld out: {labels}, {out.sum()} points of N = {group['n'][out].max():.4g}"
    lines = _aligned([COLUMNS, *(_row(group, i) for i in range(len(group["fit"])))])
    body = [lines[0]]
    for line, warnings in zip(lines[1:], group["warnings"], strict=True):
        body += [line, *(f"    ! {warning}" for warning in str(warnings).splitlines())]
    return "\n".join([head, *body])


def _row(group: Dataset, i: int) -> tuple[str, ...]:
    names = list(group["parameter"])
    value = dict(zip(names, group["parameters"][i], strict=True))
    cells = [str(group["fit"][i]), f"{group['n_points'][i]:.0f}"]
    cells += [_number(value[name], ".4g") for name in ("a", "b")]
    for name in ("alpha", "beta"):
        row = names.index(name)
        ends = [group[f"{kind}_interval"][i, row] for kind in ("profile", "bootstrap")]
        cells += [_number(value[name], ".3f"), *map(_pair, ends)]
    cells += [_number(value["c"], ".3f"), _number(group["r2"][i], ".3f"), _number(group["r2_held_out"][i], ".3f")]
    return tuple(cells)


def _joint_block(result: Result, name: str) -> str:
    group = result.groups[name]
    rows: list[tuple[str, ...]] = [JOINT_COLUMNS]
    for i, law in enumerate(group["law"]):
        numbers = [_number(group[key][i], form) for key, form in
                   (("statistic", ".2f"), ("p_value", ".3f"), ("aicc", ".1f"), ("bic", ".1f"))]  # fmt: skip
        rows.append((str(law), f"{group['n_parameters'][i]:.0f}", *numbers))
    head = f"all architectures, {name.split('/')[1]}   {len(group['n'])} points of {len(group['architecture'])}"
    lines = [head, *_aligned(rows), *(f"    ! {line}" for line in str(group["warnings"]).splitlines())]
    return "\n".join([*lines, f"{group['verdict']}"])


def _legend(result: Result) -> str:
    over = {"within-n": "points within each model size", "points": "points", "runs": "runs"}
    level = f"{result.attributes['level']:.0%}"
    lines = [
        "L = a N^-alpha + b D^-beta (+ c) in nats; N parameters without embeddings, D training tokens. R2 of L itself.",
        f"profile: {level} profile-likelihood interval. bootstrap: {level} interval over "
        f"{over[str(result.attributes['bootstrap_over'])]}.",
        "Neither speaks of other training seeds or of larger models.",
    ]
    if any(name.split("/")[0] == JOINT for name in result.groups):
        lines.append("statistic: twice the log-likelihood lost against the free law.")
        lines.append("p: how often at least as much is lost when the law is true (simulated).")
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines


def _number(value: float, form: str) -> str:
    return "-" if np.isnan(value) else f"{value + 0.0:{form}}"


def _pair(ends: np.ndarray) -> str:
    return "" if np.isnan(ends).any() else f"[{ends[0]:.2f}, {ends[1]:.2f}]"
