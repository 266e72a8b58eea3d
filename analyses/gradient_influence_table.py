"""The result of a gradient-influence study as text: a block a checkpoint, a line a window."""

from __future__ import annotations

import numpy as np

from analyses.result import Dataset, Result

COLUMNS = ("w", "influence beyond w", "above baseline", "band over it", "log slope beyond", "loss change, last w only")
LEGEND = (
    "influence beyond w: share of the sum of G(d) at distances >= w; above baseline: the same of G(d) minus it.\n"
    "band over it: mean G(d) from w to the next line's w, / baseline - 1. log slope beyond: d log G / d log d from w\n"
    "on, 0 where flat. loss change: nats, at the last tokens when only the last w are given.\n"
    "[95 % bootstrap over texts; not over training seeds]. * marked windows."
)


def table(result: Result) -> str:
    """One block a checkpoint; n/a where a number does not exist."""
    names = [name for name in result.groups if name and "/" not in name]
    return "\n\n".join([*(_block(result, name) for name in names), LEGEND])


def _block(result: Result, name: str) -> str:
    group = result.groups[name]
    rows = [COLUMNS, *(_row(group, i) for i in range(len(group["window"])))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*_head(result, name), *lines, *_remarks(result, name)])


def _head(result: Result, name: str) -> list[str]:
    group = result.groups[name]
    skipped = f", {group['n_too_short']} of {group['n_examined']} skipped as shorter" if group["n_too_short"] else ""
    lines = [
        f"{name}   {result.attributes['score']} of the last {result.attributes['n_targets']} positions, "
        f"n = {group['n_texts']} texts of {group['length']} tokens{skipped}"
    ]
    if group["extrapolation"]:
        lines.append("extrapolation: longer than the training length")
    low, high = group["baseline_interval"]
    met = group["meeting_distance"]
    meets = f"met at distance {met:.0f}" if np.isfinite(met) else "not met before it is read"
    drift = _value(group, "baseline_drift", (), ".2f")
    first = group["baseline_first"]
    lines.append(f"baseline {group['baseline']:.3g} [{low:.3g}, {high:.3g}], read from distance {first} on, {meets}")
    lines.append(f"there nearer half / farther half {drift}; 1 where it is flat")
    return lines


def _row(group: Dataset, i: int) -> tuple[str, ...]:
    return (
        f"{group['window'][i]}{'*' if group['marked'][i] else ' '}",
        _value(group, "share_beyond", i, ".3f"),
        _value(group, "share_beyond_above_baseline", i, ".3f"),
        _value(group, "band_over_baseline", i, "+.2f"),
        _value(group, "slope_beyond", i, "+.2f"),
        _value(group, "truncation_loss_change", i, "+.3f"),
    )


def _value(group: Dataset, key: str, i: int | tuple[()], form: str) -> str:
    value, (low, high) = group[key][i], group[f"{key}_interval"][i]
    if not np.isfinite(value):
        return "n/a"
    bounds = f"{low:{form}}, {high:{form}}" if np.isfinite([low, high]).all() else "n/a"
    return f"{value:{form}} [{bounds}]"


def _remarks(result: Result, name: str) -> list[str]:
    lines = []
    if f"{name}/groups" in result.groups:
        group = result.groups[f"{name}/groups"]
        for status, label in zip(group["status"], group["group"], strict=True):
            lines += [f"influence through {label} mixers only: {status}"] if status else []
    if f"{name}/noise" in result.groups:
        noise = result.groups[f"{name}/noise"]
        apart, group = noise["relative_difference"], result.groups[name]
        base, far = group["baseline"], noise["bin"] >= group["baseline_first"]
        at_most, at_baseline = (np.abs(values).max(initial=0) for values in (apart, apart[far]))
        lines.append(
            f"against float32 on {noise['influence_float32'].shape[0]} texts: G(d) differs by {at_most:.1%} at most, "
            f"by {at_baseline:.1%} where the baseline is read"
        )
        if base > 0:
            floor = noise["noise_floor"][far].mean() / base
            lines.append(f"there the norm of the error of a gradient, the noise floor, is {floor:.1%} of the baseline")
    return lines
