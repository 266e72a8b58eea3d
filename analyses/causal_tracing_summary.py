"""Joining a causal-tracing study: recovered logit differences, effects of knockouts, probes of states, with intervals.

Recovered is a ratio of sums over the pairs that separate, sum (LD_patched - LD_corrupt) / sum (LD_clean - LD_corrupt):
pairs near zero have little weight instead of a large quotient. Intervals are 95 % bootstraps over prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from analyses.bootstrap import interval, resampled_ratios
from analyses.causal_knockouts import MEASURED, SPANS
from analyses.causal_tracing_plan import BASELINE, CONTROLS, DISTANCES, KNOCKOUT, PATCHING, Fitting
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, TRAINED, probe_result, stack
from analyses.result import Dataset, Result, Variable
from analyses.retrieval_heads import kinds_of
from analyses.state_features import state_layers
from probes.patching import COMPONENTS, DIRECTIONS, POSITIONS, separated

Load = Callable[[str], Dataset]
BOUND = Variable(("bound",), ["low", "high"], "", "end of a 95 % interval over prompts")
LAYER, HEAD = ("direction", "layer", "component", "position"), ("direction", "layer", "head", "position")
CHANGES = {
    "log_p": ("log_p_change", "nat", "log probability of the value, minus that without a knockout (paired)"),
    "correct": ("accuracy_change", "1", "share of prompts with all digits right, minus that without (paired)"),
}


def join(plan: Any, load: Load) -> Result:
    """Groups NAME, NAME/patching, NAME/knockout, NAME/states (recurrent layers) and NAME/probes of every checkpoint."""
    groups: dict[str, Dataset] = {}
    for name in plan.checkpoints:
        patched, plain, knocked = (
            _joined([load(unit.id) for unit in plan.units(name, part, weights)], axis)
            for part, weights, axis in (
                (PATCHING, TRAINED, "pair"), (BASELINE, RANDOM_WEIGHTS, "pair"), (KNOCKOUT, TRAINED, "pair"),
            )
        )  # fmt: skip
        groups[name] = _layers(plan, name, patched, plain, knocked)
        groups[f"{name}/patching"] = _patching(plan, name, patched, plain)
        groups[f"{name}/knockout"] = _knockout(plan, name, knocked)
        if (states := _states(plan, name, patched, plain)) is not None:
            groups[f"{name}/states"] = states
        if plan.n_samples:
            groups[f"{name}/probes"] = _probes(plan, name, load)
    settings = {"separation": plan.config.separation, "haystack": plan.config.haystack, "values": plan.config.values}
    return Result(groups, {**settings, "n_pairs": plan.n_pairs, "n_samples": plan.n_samples})


def _joined(parts: list[Dataset], axis: str) -> dict[str, np.ndarray]:
    """The arrays of all units, along their pairs."""
    found = {}
    for name, variable in parts[0].variables.items():
        where = variable.dims.index(axis)
        found[name] = np.concatenate([part[name] for part in parts], where)
    return found


def _separated(plan: Any, found: dict[str, np.ndarray]) -> np.ndarray:
    known: np.ndarray = separated(found["clean"], found["corrupt"], plan.config.separation)
    return known


def _layers(
    plan: Any, name: str, patched: dict[str, np.ndarray], plain: dict[str, np.ndarray], knocked: dict[str, np.ndarray]
) -> Dataset:
    layers, context = plan.layers(name), plan.checkpoints[name].context
    length = plan.lengths[name]
    scalars = {
        "length": (length, "token", "of a prompt with its answer"),
        "extrapolation": (int(length > (context or length)), "1", "1: longer than the training length"),
        "n_pairs": (plan.n_pairs, "1", "pairs of prompts that differ in the value only"),
        "n_separated": (
            int(_separated(plan, patched).sum()),
            "1",
            "pairs whose runs separate; only these count",
        ),
        "n_separated_untrained": (int(_separated(plan, plain).sum()), "1", "the same of random weights"),
        "clean": (float(patched["clean"].mean()), "nat", "mean logit difference of the clean prompts"),
        "corrupt": (float(patched["corrupt"].mean()), "nat", "of the corrupted prompts"),
        "accuracy": (float(knocked["correct"][0, 0].mean()), "1", "share of clean prompts with all digits right"),
        "log_p": (float(knocked["log_p"][0, 0].mean()), "nat", "mean log probability of the value, all its tokens"),
    }
    variables = {key: Variable((), *values) for key, values in scalars.items()}
    heads = max((layer.n_heads for layer in layers), default=0)
    windows = [np.nan if layer.window is None else float(layer.window) for layer in layers]
    variables |= {
        "kind": Variable(("layer",), [layer.kind for layer in layers], "", "kind of the layer"),
        "window": Variable(("layer",), windows, "token", "of its sliding path; NaN: it has none"),
        "head_kind": Variable(("layer", "head"), kinds_of(layers, heads), "", "of the head's path; empty: no head"),
    }
    return Dataset(
        variables, {"layer": _layer_coord(len(layers))}, "Layers of the checkpoint, and what was measured on"
    )


def _layer_coord(count: int) -> Variable:
    return Variable(("layer",), np.arange(count), "1", "absolute layer id")


def _patching(plan: Any, name: str, found: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> Dataset:
    known = _separated(plan, found)
    pair = ("pair",)
    variables = {
        "clean": Variable(pair, found["clean"], "nat", "logit difference of the clean prompt, right minus wrong token"),
        "corrupt": Variable(pair, found["corrupt"], "nat", "of the corrupted prompt, the same two tokens"),
        "separated": Variable(pair, known, "1", "whether the two differ by the separation or more"),
        "untrained_clean": Variable(pair, plain["clean"], "nat", "clean, of the same architecture with random weights"),
        "untrained_corrupt": Variable(pair, plain["corrupt"], "nat", "corrupt, of the same"),
        "first_value_token": Variable(pair, plan.swaps(name).needle[:, 0], "token", "position of the value"),
    }
    for prefix, key, dims in (("", "layers", LAYER), ("head_", "heads", HEAD)):
        values = found[key]
        stored = Variable(
            (dims[0], "pair", *dims[1:]), values.astype(np.float32), "nat", "of the patched run; NaN: n/a"
        )
        share, bounds = _recovered(np.moveaxis(values, 1, -1), found, known, plan.config.seed)
        text = "share of clean minus corrupt logit difference: denoising brings it back, noising leaves it; NaN: n/a"
        variables[f"{prefix}logit_difference"] = stored
        variables[f"{prefix}recovered"] = Variable(dims, share, "1", text)
        variables[f"{prefix}recovered_interval"] = Variable((*dims, "bound"), bounds, "1", "bootstrap interval of it")
    coords = {
        "direction": Variable(("direction",), list(DIRECTIONS), "", "which run is patched: corrupted, or clean"),
        "component": Variable(("component",), list(COMPONENTS), "", "hook point; attn_out: the mixer, whatever it is"),
        "position": Variable(("position",), list(POSITIONS), "", "the value's tokens; those behind them; the last one"),
        "layer": _layer_coord(len(plan.layers(name))),
        "bound": BOUND,
    }
    return Dataset(variables, coords, "Value-swap activation patching, one point at a time")


def _recovered(
    patched: np.ndarray, found: dict[str, np.ndarray], known: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ratio of sums over the separated pairs, the last axis of `patched`."""
    shape = patched.shape[:-1]
    weight = np.where(known, found["clean"] - found["corrupt"], 0.0)
    change = np.where(known, patched - found["corrupt"], 0.0).reshape(-1, len(known))
    change[np.isnan(patched).reshape(-1, len(known)).any(1)] = np.nan
    share, sampled = resampled_ratios(change, weight, seed)
    return share.reshape(shape), interval(sampled).reshape(*shape, 2)


def _knockout(plan: Any, name: str, found: dict[str, np.ndarray]) -> Dataset:
    sets, dims = plan.sets(name), ("knockout", "span")
    texts = {
        "log_p": ("nat", "log probability of the whole value, teacher-forced; NaN: n/a"),
        "correct": ("1", "1 if all digits are the argmax, teacher-forced"),
        "logit_difference": ("nat", "right minus wrong token, at the token that predicts them"),
    }
    variables = {
        key: Variable((*dims, "pair"), found[key].astype(np.float32), *texts[key]) for key in MEASURED
    }  # fmt: skip
    for key, (label, units, text) in CHANGES.items():
        change = found[key] - found[key][:1]
        ones = np.ones(change.shape[-1])
        mean, sampled = resampled_ratios(change.reshape(-1, change.shape[-1]), ones, plan.config.seed)
        bounds = interval(sampled).reshape(*change.shape[:2], 2)
        variables[label] = Variable(dims, mean.reshape(change.shape[:2]), units, text)
        variables[f"{label}_interval"] = Variable((*dims, "bound"), bounds, units, f"bootstrap interval of {label}")
    described = {
        "set_kind": ([one.kind for one in sets], "none, group, layer, window or head"),
        "queries": (
            [one.queries for one in sets],
            "who cannot see it: the tokens that predict it, or all later",
        ),
    }
    for key, (values, text) in described.items():
        variables[key] = Variable(("knockout",), values, "", text)
    last = [one.head[0] if one.head else one.layers[-1] if one.layers else -1 for one in sets]
    variables["last_layer"] = Variable(("knockout",), last, "1", "the set's last layer; -1: a group")
    coords = {
        "knockout": Variable(("knockout",), [one.label for one in sets], "", "what cannot be seen through"),
        "span": Variable(("span",), list(SPANS), "", "what is hidden: the value, or as many tokens elsewhere"),
        "bound": BOUND,
    }
    text = "Knockouts; softmax: keys out of the softmax, recurrent: the state read is one without the span's writes"
    return Dataset(variables, coords, text)


def _states(plan: Any, name: str, patched: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> Dataset | None:
    """What is left of the value in recurrent states, without a probe; None where there is none."""
    layers = state_layers(plan.layers(name))
    if not layers:
        return None
    values = np.stack([patched["difference"], plain["difference"]])
    known = ~np.isnan(values).all((0, 1, 2))
    values = values[..., known]
    numerator = np.moveaxis(values, 1, -1)
    mean, bounds = np.full(numerator.shape[:-1], np.nan), np.full((*numerator.shape[:-1], 2), np.nan)
    for column in range(values.shape[-1]):  # deep needles leave no room for large distances: their own prompts each
        there = np.isfinite(numerator[:, :, column]).all((0, 1))
        part = numerator[:, :, column][..., there].reshape(-1, int(there.sum()))
        ratio, sampled = resampled_ratios(part, np.ones(part.shape[1]), plan.config.seed)
        mean[:, :, column] = ratio.reshape(mean.shape[:2])
        bounds[:, :, column] = interval(sampled).reshape(*mean.shape[:2], 2)
    dims, text = ("control", "recurrent", "distance"), "||S_t - S'_t|| / ||S_t||, S' of the prompt with the other value"
    variables = {
        "difference": Variable((dims[0], "pair", *dims[1:]), values.astype(np.float32), "1", f"{text}; NaN: no room"),
        "mean": Variable(dims, mean, "1", f"mean of {text}"),
        "mean_interval": Variable((*dims, "bound"), bounds, "1", "bootstrap interval of it"),
    }
    coords = {
        "control": Variable(("control",), [TRAINED, RANDOM_WEIGHTS], "", "weights"),
        "recurrent": Variable(("recurrent",), list(layers), "1", "absolute layer id"),
        "distance": Variable(("distance",), np.array(DISTANCES)[known], "token", "behind the value's first token"),
        "bound": BOUND,
    }
    return Dataset(variables, coords, "What the value changes in a recurrent state, by distance")


def _probes(plan: Any, name: str, load: Load) -> Dataset:
    parts = {control: load(Fitting(name, control).id) for control in CONTROLS}
    probes = stack(parts)
    results = [probe_result(probes, control) for control in CONTROLS]
    features = [str(feature) for feature in probes.coords["feature"].values]
    states = [", " in feature for feature in features]
    layer = [int(feature.split(".")[1].split(" ")[0]) for feature in features]
    distance = [float("nan") if not s or f.endswith("last") else float(f.rsplit(" ", 1)[1])
                for f, s in zip(features, states, strict=True)]  # fmt: skip
    room = plan.lengths[name] - 1 - parts[TRAINED]["needle"]
    distance = [float(room.mean()) if f.endswith("state, last") else d for f, d in zip(features, distance, strict=True)]
    dims = ("control", "feature")
    variables = {
        **probes.variables,
        "accuracy": Variable(
            dims, [r.accuracy for r in results], "1", "share of held-out prompts whose class is right"
        ),
        "accuracy_interval": Variable(
            (*dims, "bound"), np.stack([r.accuracy_interval() for r in results]), "1", "Wilson interval of it"
        ),
        "chance": Variable(("control",), [r.chance for r in results], "1", "of an answer that knows the labels only"),
        "is_state": Variable(("feature",), states, "1", "a recurrent state; else the stream at the last token"),
        "feature_layer": Variable(("feature",), layer, "1", "absolute layer id"),
        "distance": Variable(("feature",), distance, "token", "behind the value's first token; NaN: a stream"),
        "needle": parts[TRAINED].variables["needle"],
    }
    text = "Linear probes for the needle's class in recurrent states, and in the stream at the last token"
    return Dataset(variables, {**probes.coords, "bound": BOUND}, text)
