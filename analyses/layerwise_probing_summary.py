"""Joining a probing study: what every probe and control found, gains with intervals, and the share of the gain.

Everything here is computed from the stored predictions, so that the file holds what its numbers were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from analyses.layerwise_probing_plan import MEAN_EMBEDDING, Fitting
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, TRAINED, probe_result, stack
from analyses.probing_share import share_difference
from analyses.result import Dataset, Result, Variable
from probes.layerwise import LayerwiseResult, gain_over, layer_gains, share_of_gain
from probes.layerwise.result import Metric

METRICS: dict[Metric, tuple[str, str]] = {"accuracy": ("", "1"), "log_loss": ("log_loss_", "nat")}  # prefix, units
PARTS = ("total", "mixer", "mlp")
OVER = "Intervals (95 %) over held-out prompts, for the probes as fitted and these weights; not over training seeds"
BOUND = Variable(("bound",), ["low", "high"], "", "end of a 95 % interval over held-out prompts")


def join(plan: Any, parts: dict[str, Dataset], load: Callable[[str], Dataset]) -> Result:
    """Groups NAME and NAME/HAYSTACK; with --keep-features also NAME/HAYSTACK/features."""
    groups: dict[str, Dataset] = {}
    for name in plan.checkpoints:
        first = parts[Fitting(name, plan.haystacks[0], TRAINED).id]
        kinds = plan.loaded_kinds[name] = [str(kind) for kind in first["kind"]]
        groups[name] = _layers(plan, name, first)
        full = np.array([kind == "full" for kind in kinds])
        for haystack in plan.all_haystacks:
            found = {control: parts[Fitting(name, haystack, control).id] for control in plan.controls(haystack)}
            groups[f"{name}/{haystack}"] = _haystack(plan, name, found, full)
            if plan.config.keep_features:
                groups[f"{name}/{haystack}/features"] = _features(plan, name, haystack, load)
    settings = {"n_samples": plan.n, "classes": len(plan.values), "classifier": plan.classifier, "C": plan.C}
    return Result(groups, {**settings, "test_size": plan.test_size})


def _layers(plan: Any, name: str, first: Dataset) -> Dataset:
    length, context = plan.lengths[name], plan.checkpoints[name].context
    given = plan.prompts[name, plan.haystacks[0]].given
    scalars = {
        "length": (length, "token", "tokens given, the probed one last"),
        "given": (given, "token", "answer tokens among them (teacher forcing)"),
        "extrapolation": (int(length > (context or length)), "1", "1: longer than the training length"),
    }
    variables = {key: Variable((), *values) for key, values in scalars.items()}
    variables["kind"] = Variable(("layer",), first["kind"], "", "kind of the layer")
    variables["window"] = Variable(("layer",), first["window"], "token", "of its sliding path; NaN: it has none")
    return Dataset(variables, {"layer": _layer_coord(len(first["kind"]))}, "Layers of the checkpoint")


def _layer_coord(count: int) -> Variable:
    return Variable(("layer",), np.arange(count), "1", "absolute layer id")


def _haystack(plan: Any, name: str, found: Mapping[str, Dataset], full: np.ndarray) -> Dataset:
    probes = stack(found)
    results = {control: probe_result(probes, control) for control in found}
    variables = {**probes.variables, **_scores(results), **_share(results, full, plan.config.seed)}
    for metric in METRICS:
        variables |= _gains(results, metric)
    variables["needle"] = found[TRAINED].variables["needle"]
    computed = int(found[TRAINED]["computed"])
    variables["tokens_computed"] = Variable((), computed, "token", "forwarded for the trained features")
    variables["tokens_of_prompts"] = Variable((), plan.n * plan.lengths[name], "token", "of all prompts")
    coords = {
        **probes.coords,
        "part": Variable(("part",), list(PARTS), "", "total = mixer + mlp; NaN where resid_mid is not known"),
        "layer": _layer_coord(len(full)),
        "metric": Variable(("metric",), list(METRICS), "", "what the gains are of"),
        "bound": BOUND,
    }
    return Dataset(variables, coords, OVER)


def _scores(results: Mapping[str, LayerwiseResult]) -> dict[str, Variable]:
    found = list(results.values())
    dims, chance = ("control", "feature"), "of an answer that knows the training labels only"
    scores = {
        "correct": ((*dims, "sample"), [r.predicted == r.label for r in found], "1", "whether the prediction is right"),
        "accuracy": (dims, [r.accuracy for r in found], "1", "share of held-out prompts whose class is right"),
        "accuracy_interval": ((*dims, "bound"), [r.accuracy_interval() for r in found], "1", "Wilson interval of it"),
        "log_loss": (dims, [r.log_loss for r in found], "nat", "mean of -log p(true class)"),
        "chance": (("control",), [r.chance for r in found], "1", f"accuracy {chance}"),
        "chance_log_loss": (("control",), [r.chance_log_loss for r in found], "nat", f"log-loss {chance}"),
    }
    return {name: Variable(of, np.stack(values), units, text) for name, (of, values, units, text) in scores.items()}


def _gains(results: Mapping[str, LayerwiseResult], metric: Metric) -> dict[str, Variable]:
    prefix, units = METRICS[metric]
    gains = [layer_gains(result, metric) for result in results.values()]
    variables = {}
    text = f"{metric} after the layer (mixer: after its mixer; mlp: from there on) against before; above 0: better"
    for key, dims, field in (("gain", (), "value"), ("gain_interval", ("bound",), "interval")):
        values = np.stack([[getattr(getattr(gain, part), field) for part in PARTS] for gain in gains])
        variables[prefix + key] = Variable(("control", "part", "layer", *dims), values, units, text)
    if RANDOM_WEIGHTS in results:
        over = gain_over(results[TRAINED], results[RANDOM_WEIGHTS], metric)
        text = f"{metric} of trained against random weights, same prompts; above 0: trained is better"
        variables[f"{prefix}over_random"] = Variable(("feature",), over.value, units, text)
        variables[f"{prefix}over_random_interval"] = Variable(("feature", "bound"), over.interval, units, text)
    return variables


def _share(results: Mapping[str, LayerwiseResult], full: np.ndarray, seed: int) -> dict[str, Variable]:
    """The statistic chosen beforehand; NaN with the reason in share_status where it says nothing."""
    shape, status = (len(results), len(METRICS)), ""
    value, expected, p = (np.full(shape, np.nan) for _ in range(3))
    bounds = np.full((*shape, 2), np.nan)
    over, over_bounds = np.full(len(METRICS), np.nan), np.full((len(METRICS), 2), np.nan)
    if full.all() or not full.any():
        status = f"n/a: {'all' if full.all() else 'none'} of the {len(full)} layers are full attention"
    else:
        for column, metric in enumerate(METRICS):
            for row, result in enumerate(results.values()):
                share = share_of_gain(result, full, metric, seed=seed)
                value[row, column], expected[row, column] = share.share, share.expected
                p[row, column], bounds[row, column] = share.p_value, share.interval
            if RANDOM_WEIGHTS in results:
                found = share_difference(results[TRAINED], results[RANDOM_WEIGHTS], full, metric, seed)
                over[column], over_bounds[column] = found
    dims, text = ("control", "metric"), "of the gain (losses count 0) that sits in full-attention layers"
    return {
        "share": Variable(dims, value, "1", f"share {text}"),
        "share_interval": Variable((*dims, "bound"), bounds, "1", "bootstrap interval of it"),
        "share_expected": Variable(dims, expected, "1", "mean share over all assignments of full to the layers"),
        "share_p": Variable(dims, p, "1", "one-sided permutation p: layer kinds exchangeable over depth"),
        "share_over_random": Variable(("metric",), over, "1", "share of trained minus share of random weights"),
        "share_over_random_interval": Variable(("metric", "bound"), over_bounds, "1", "paired bootstrap of it"),
        "share_status": Variable((), status, "", "empty: the shares apply"),
    }


def _features(plan: Any, name: str, haystack: str, load: Callable[[str], Dataset]) -> Dataset:
    """What the probes read, of all prompts: trained, and of random weights where they were computed."""
    variables, coords = {}, {}
    for weights in (TRAINED, RANDOM_WEIGHTS):
        if weights in plan.controls(haystack):
            parts = [load(unit.id) for unit in plan.extractions(name, haystack, weights)]
            text = f"residual stream at the probed token, {weights}"
            streams, means = (np.concatenate([part[key] for part in parts]) for key in ("features", MEAN_EMBEDDING))
            variables[weights] = Variable(("prompt_number", "hook", "width"), streams, "1", text)
            variables[f"{MEAN_EMBEDDING}, {weights}"] = Variable(
                ("prompt_number", "width"), means, "1", "of the prompt"
            )
            coords = {"hook": Variable(("hook",), parts[0]["feature"], "", "hook point")}
    label = np.concatenate([part["label"] for part in parts])
    variables["class_index"] = Variable(("prompt_number",), label, "1", "class of the prompt, an index along class")
    return Dataset(variables, coords, "What the probes were fitted to; rows are prompts 0, 1, 2, ...")
