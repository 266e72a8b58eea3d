"""Joining the units of a gradient-influence study: values of each text, curves, baseline and shares with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from analyses.bootstrap import interval
from analyses.gradient_influence_measures import GROUPS
from analyses.gradient_influence_plan import FLOAT32, INFLUENCE, TRUNCATION
from analyses.influence_curve import (
    SPREADS,
    TAIL,
    Baseline,
    baseline,
    bin_means,
    excess,
    log_bins,
    mean_interval,
    meeting,
    resampled,
    shares,
    slopes,
)
from analyses.result import Dataset, Result, Variable

UNITS = {"log_prob": "nat / unit of embedding", "logit_sum": "logit / unit of embedding"}
OVER = "Intervals over texts, not over training seeds; distances from the last position read"
BOUND = Variable(("bound",), ["low", "high"], "", "end of a 95 % bootstrap interval over texts")


def join(plan: Any, parts: dict[str, Dataset]) -> Result:
    """Groups NAME, NAME/texts and, if there, NAME/layers, NAME/groups, NAME/noise for every checkpoint."""
    groups: dict[str, Dataset] = {}
    for name in plan.checkpoints:
        norm, losses = _rows(plan, parts, name, INFLUENCE, "norm"), _losses(plan, parts, name)
        groups[name] = _summary(plan, name, norm, losses)
        groups[f"{name}/texts"] = _texts(plan, name, parts, norm, losses)
        if plan.config.layers:
            groups[f"{name}/layers"] = _layers(plan, name, parts)
        if plan.config.groups:
            groups[f"{name}/groups"] = _groups(plan, name, parts)
        if plan.noise_texts(name):
            groups[f"{name}/noise"] = _noise(plan, name, parts, norm)
    return Result(groups, {"score": plan.score, "n_targets": plan.n_targets})


def _rows(plan: Any, parts: dict[str, Dataset], name: str, part: str, variable: str) -> np.ndarray:
    return np.concatenate([parts[unit][variable] for unit in plan.parts(name, part)])


def _losses(plan: Any, parts: dict[str, Dataset], name: str) -> np.ndarray:
    """Per text: mean loss at the targets given all, then given each window."""
    losses = _rows(plan, parts, name, TRUNCATION, "loss")
    if plan.score != "log_prob":
        return losses
    return np.concatenate([-_rows(plan, parts, name, INFLUENCE, "score")[:, None].astype(np.float64), losses], axis=1)


def _per_text(plan: Any, values: np.ndarray) -> np.ndarray:
    """float32 as stored; with --compact the last 18 of 23 bits of the mantissa are rounded off, which packs well."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if not plan.config.compact:
        return values
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(18)) & np.uint32(1)
    rounded = (bits + np.uint32(0x1FFFF) + even) & np.uint32(0xFFFC0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def _curve(plan: Any, found: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
    """A mean curve and its interval, in half the space with --compact."""
    return tuple(values.astype(np.float32) for values in found) if plan.config.compact else found


def _distance(count: int) -> Variable:
    return Variable(("distance",), np.arange(count, dtype=np.int32), "token", "from the last position read, itself 0")


def _units(plan: Any) -> str:
    return UNITS.get(plan.score, UNITS["logit_sum"])


def _bins(plan: Any, name: str) -> tuple[np.ndarray, Variable]:
    edges = log_bins(plan.n_distances(name))
    return edges, Variable(("bin",), edges[:-1], "token", "first distance of a bin; it ends where the next begins")


def _summary(plan: Any, name: str, norm: np.ndarray, losses: np.ndarray) -> Dataset:
    seed, units = plan.config.seed, _units(plan)
    edges, bins = _bins(plan, name)
    base = baseline(norm, seed)
    variables: dict[str, Variable] = {}

    def add(key: str, dims: tuple[str, ...], found: tuple[Any, ...], unit: str, text: str) -> None:
        variables[key] = Variable(dims, found[0], unit, text)
        variables[f"{key}_interval"] = Variable((*dims, "bound"), found[1], unit, f"95 % bootstrap interval of {key}")

    add("influence", ("distance",), _curve(plan, mean_interval(norm, seed)), units, "G(d), mean over texts")
    binned = mean_interval(bin_means(norm, edges), seed)
    add("binned", ("bin",), binned, units, "mean of G(d) over the distances of a bin")
    over = excess(norm, edges, base, seed)
    add("excess", ("bin",), over, units, "binned minus the baseline (paired)")
    variables["bin_count"] = Variable(("bin",), np.diff(edges), "1", "distances in a bin")
    for key, found, unit, text in _of_baseline(base, units):
        add(key, (), found, unit, text)
    variables |= _scalars(plan, name, base, meeting(norm, edges, base, seed), units)
    windows = plan.windows(name)
    beyond = shares(norm, windows, base, seed)
    add("share_beyond", ("window",), beyond.raw, "1", "sum of G(d) over d >= w / its whole sum")
    text = "the same of G(d) minus the baseline, not clipped: about 0 or NaN where nothing stands above it"
    add("share_beyond_above_baseline", ("window",), beyond.subtracted, "1", text)
    text = "mean of G(d) from w to the next window (or the end) / baseline - 1"
    add("band_over_baseline", ("window",), beyond.band, "1", text)
    text = "d log G / d log d from w to the end, over bins, the first 4 tokens of a text left out: 0 where flat"
    add("slope_beyond", ("window",), slopes(norm, edges, windows, seed), "1", text)
    change, draws = resampled(losses[:, 1:] - losses[:, :1], seed)
    text = "mean loss of the last n_targets tokens given the last w read, minus given all (paired); NaN: w < n_targets"
    add("truncation_loss_change", ("window",), (change, interval(draws)), "nat", text)
    variables["marked"] = Variable(("window",), np.isin(windows, plan.marked[name]), "1", "windows asked for")
    coords = {
        "distance": _distance(norm.shape[1]),
        "bin": bins,
        "window": Variable(("window",), windows, "token", "distances below w lie within"),
        "bound": BOUND,
    }
    return Dataset(variables, coords, OVER)


def _of_baseline(base: Baseline, units: str) -> list[tuple[str, tuple[float, np.ndarray], str, str]]:
    """Numbers of the baseline that have an interval."""
    part = f"over the last {TAIL:.0%} of the distances"
    text = f"median of its nearer half / of its farther half: 1 where the curve is flat {part}"
    return [
        ("baseline", (base.value, interval(base.draws[:, None])[0]), units, f"median over blocks of G(d) {part}"),
        ("baseline_drift", (base.drift, interval(base.drift_draws[:, None])[0]), "1", text),
    ]


def _scalars(plan: Any, name: str, base: Baseline, met: float, units: str) -> dict[str, Variable]:
    cut, length, context = plan.cuts[name], plan.lengths[name], plan.checkpoints[name].context
    meets = f"start of the first bin from which on the intervals of all excesses reach {SPREADS:g} spreads"
    found = {
        "baseline_spread": (base.spread, units, "standard deviation of the blocks, by their median absolute deviation"),
        "baseline_block": (base.block, "token", "distances of a block"),
        "baseline_first": (base.first, "token", "distance from which on the baseline is read"),
        "meeting_distance": (met, "token", f"{meets} (for its width); NaN: not before the baseline is read"),
        "length": (length, "token", "tokens of each text: its first ones, a BOS included"),
        "n_texts": (len(cut.names), "1", "texts"),
        "n_too_short": (cut.too_short, "1", "texts skipped because they have fewer tokens"),
        "n_examined": (cut.examined, "1", "texts looked at"),
        "bos": (int(cut.bos), "1", "1: the tokenizer put a BOS in front; it counts in no curve and no share"),
        "extrapolation": (int(length > (context or length)), "1", "1: longer than the training length"),
    }  # fmt: skip
    return {key: Variable((), *values) for key, values in found.items()}


def _text_coord(plan: Any, name: str, count: int | None = None) -> dict[str, Variable]:
    return {"text": Variable(("text",), plan.cuts[name].names[:count], "", "name of the text")}


def _texts(plan: Any, name: str, parts: dict[str, Dataset], norm: np.ndarray, losses: np.ndarray) -> Dataset:
    score, bos = (_rows(plan, parts, name, INFLUENCE, key) for key in ("score", "bos"))
    units = _units(plan)
    variables = {
        "influence": Variable(("text", "distance"), _per_text(plan, norm), units, "|| ds / de_(t-d) ||_2"),
        "score": Variable(("text",), score, units.split(" /")[0], f"s itself: {plan.score}, mean over the targets"),
        "n_tokens": Variable(("text",), plan.cuts[name].n_tokens, "token", "tokens of the whole text, a BOS included"),
        "loss": Variable(("text",), losses[:, 0], "nat", "mean loss of the last n_targets tokens, given all"),
        "truncated_loss": Variable(("text", "window"), losses[:, 1:], "nat", "the same, given the last w tokens read"),
    }
    if plan.cuts[name].bos:
        variables["bos_influence"] = Variable(("text",), bos, units, "the same of the BOS, left out of the curves")
    coords = {**_text_coord(plan, name), "distance": _distance(norm.shape[1])}
    return Dataset(variables, coords, "Values of each text")


def _layers(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    values, (_, bins), kinds = _rows(plan, parts, name, INFLUENCE, "layers"), _bins(plan, name), plan.kinds(name)
    text = "|| ds / d(input of the layer)_(t-d) ||_2, mean over the distances of a bin"
    variables = {
        "influence": Variable(("text", "layer", "bin"), _per_text(plan, values), "score / unit of stream", text),
        "kind": Variable(("layer",), kinds, "", "kind of the layer"),
    }
    coords = {"layer": Variable(("layer",), np.arange(len(kinds)), "1", "absolute layer id"), "bin": bins}
    return Dataset(variables, {**coords, **_text_coord(plan, name)}, "Influence at blocks.N.hook_resid_pre")


def _groups(plan: Any, name: str, parts: dict[str, Dataset]) -> Dataset:
    _, bins = _bins(plan, name)
    status = [plan.not_applicable(name, group) for group in GROUPS]
    shape = (len(plan.cuts[name].names), len(bins.values))
    values = [np.full(shape, np.nan) if no else _rows(plan, parts, name, group, "norm")
              for group, no in zip(GROUPS, status, strict=True)]  # fmt: skip
    text = "influence when no gradient passes the mixers of the other group, mean over the distances of a bin"
    variables = {
        "influence": Variable(("group", "text", "bin"), _per_text(plan, np.array(values)), _units(plan), text),
        "status": Variable(("group",), status, "", "empty: measured"),
    }
    coords = {"group": Variable(("group",), list(GROUPS), "", "mixers that pass gradients"), "bin": bins}
    return Dataset(variables, {**coords, **_text_coord(plan, name)}, "Influence through one group of mixers")


def _noise(plan: Any, name: str, parts: dict[str, Dataset], norm: np.ndarray) -> Dataset:
    """The number format's part of the curve: the same texts in float32."""
    exact, error = (_rows(plan, parts, name, FLOAT32, key) for key in ("norm", "error"))
    edges, bins = _bins(plan, name)
    rough, fine = bin_means(norm[: len(exact)], edges), bin_means(exact, edges)
    (mean, draws), (_, fine_draws) = resampled(rough, plan.config.seed), resampled(fine, plan.config.seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative, bounds = mean / fine.mean(0) - 1, interval(draws / fine_draws - 1)
    floor, floor_bounds = mean_interval(bin_means(error, edges), plan.config.seed)
    dtype, units = plan.dtypes[name], _units(plan)
    text = f"noise floor: || gradient in {dtype} - gradient in float32 ||_2, mean over texts and the distances of a bin"
    pair = ("bin", "bound")
    variables = {
        "influence_float32": Variable(("text", "distance"), _per_text(plan, exact), units, "in float32"),
        "error": Variable(("text", "distance"), _per_text(plan, error), units, "norm of the gradients' difference"),
        "noise_floor": Variable(("bin",), floor, units, text),
        "noise_floor_interval": Variable(pair, floor_bounds, units, "95 % bootstrap interval over texts"),
        "relative_difference": Variable(("bin",), relative, "1", f"binned G(d) in {dtype} / in float32 - 1"),
        "relative_difference_interval": Variable(pair, bounds, "1", "95 % bootstrap interval over texts"),
    }
    coords = {"bin": bins, "bound": BOUND, "distance": _distance(exact.shape[1])}
    coords |= _text_coord(plan, name, len(exact))
    return Dataset(variables, coords, f"What {dtype} does to the curve, on the first {len(exact)} texts")
