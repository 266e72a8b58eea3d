"""Joining the units of a tracing study: tables of every head at every checkpoint, curves, crossings, ablations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from analyses.result import Dataset, Result, Variable
from analyses.retrieval_ablation import ablation_dataset
from analyses.retrieval_curves import SERIES, Measured, best_of_each, curves, described, others
from analyses.retrieval_heads import Head, by_kv_groups, heads_of, kinds_of, kv_groups

NOTED = 0.1
"""Mean mass from which a head is counted as attending to needles at all, whatever was asked to be followed."""
CHECKPOINT = ("checkpoint",)
PER_HEAD = ("checkpoint", "layer", "head")
Load = Callable[[str], Dataset]


def join(plan: Any, load: Load) -> Result:
    """Groups RUN, RUN/heads, RUN/prompts and RUN/ablation for every run."""
    groups: dict[str, Dataset] = {}
    for name in plan.runs:
        groups |= _run(plan, name, load)
    attributes = {"query": plan.query, "noted_mass": NOTED, "haystack": plan.config.haystack}
    if plan.config.prompts is not None:
        attributes["haystack"] = "own prompts"
    return Result(groups, attributes)


def _run(plan: Any, name: str, load: Load) -> dict[str, Dataset]:
    run, layers = plan.runs[name], plan.layers(name)
    parts = [load(f"{name}/{checkpoint}") for checkpoint in run.checkpoints]
    softmax = np.zeros((len(layers), plan.n_heads(name)), bool)
    softmax[tuple(np.array(heads_of(layers)).T)] = True
    refusal = str(parts[-1]["distance_refusal"])
    values = {key: np.stack([part[key] for part in parts]) for key in parts[0].variables if key != "distance_refusal"}
    mass, entropy, copied = (np.where(softmax, values[key], np.nan) for key in ("mass", "entropy", "copy"))
    distance = values["query_distance"] + values["key_distance"]
    measured = Measured(values["choosing_mass"], mass, entropy, copied, values["correct"], values["digits"], distance)
    followed = plan.chosen(parts[-1]["choosing_mass"])
    groups = {
        name: _summary(plan, name, measured, followed, softmax, refusal),
        f"{name}/heads": _heads(layers, measured, values, softmax, followed),
        f"{name}/prompts": _prompts(plan, name, values, softmax),
    }
    if not plan.config.no_ablation:
        *singles, pairs = [load(unit.id) for unit in plan.ablations(name)]
        groups[f"{name}/ablation"] = ablation_dataset(
            parts[-1], singles, pairs, followed, heads_of(layers, ("full",)), plan.config.seed
        )
    return groups


def _summary(
    plan: Any, name: str, measured: Measured, followed: list[Head], softmax: np.ndarray, refusal: str
) -> Dataset:
    run, config = plan.runs[name], plan.config
    tokens, rest = np.array(run.tokens), others(followed, softmax)
    kinds = ("accuracy", "mass", "entropy", "distance")
    marks = {kind: getattr(config, f"{kind}_marks") for kind in kinds}
    best = np.array(best_of_each(measured))
    variables = {
        "tokens": Variable(CHECKPOINT, tokens, "token", "training tokens; 0 has no logarithm and no part in crossings"),
        "step": Variable(CHECKPOINT, run.steps, "1", "training step"),
        "followed": Variable(("rank", "place"), np.array(followed, int).reshape(-1, 2), "1", "heads followed"),
        "best": Variable(("checkpoint", "place"), best, "1", "head with most mass there, on the choosing prompts"),
        **described(curves(measured, followed, rest, config.seed), tokens, marks),
        **_scalars(plan, name, measured, followed, softmax),
        "distance_refusal": Variable((), refusal, "", "why there is no Q/K distance; empty: there is one"),
    }
    coords = {
        "checkpoint": Variable(CHECKPOINT, list(run.checkpoints), "", "checkpoint, by rising tokens"),
        "series": Variable(("series",), list(SERIES), "", "curve; see series_text"),
        "place": Variable(("place",), ["layer", "head"], "", "where a head is"),
        "bound": Variable(("bound",), ["low", "high"], "", "end of an interval"),
        "rank": Variable(("rank",), np.arange(1, len(followed) + 1), "1", "by mass at the last checkpoint"),
    }
    texts = [text for _, _, text in SERIES.values()]
    variables["series_text"] = Variable(("series",), texts, "", "what the curve is")
    return Dataset(variables, coords, "Intervals over prompts, not over training seeds")


def _scalars(
    plan: Any, name: str, measured: Measured, followed: list[Head], softmax: np.ndarray
) -> dict[str, Variable]:
    last = measured.choosing[-1].mean(0)
    status = f"no head has a mean mass of {plan.config.threshold} or more" if not followed else ""
    prompts, context = plan.traced(name), plan.runs[name].described.context or 0
    length = prompts.ids.shape[1]
    visible = prompts.answer[:, 0] + plan.query + 1
    uniform = float(((prompts.value[:, 1] - prompts.value[:, 0]) / visible).mean())
    scalars = (
        ("status", status, "", "empty: heads were found"),
        ("n_noted", int((last >= NOTED).sum()), "1", f"softmax heads with a mean mass of {NOTED} or more"),
        ("n_softmax", int(softmax.sum()), "1", "softmax heads"),
        ("n_choosing", measured.choosing.shape[1], "1", "prompts that choose heads"),
        ("n_tracing", len(prompts.ids), "1", "prompts that everything else is measured on"),
        ("length", length, "token", "of a prompt with its answer"),
        ("extrapolation", int(length > context > 0), "1", "1: prompts are longer than the training length"),
        ("uniform_mass", uniform, "1", "mass on the value of a full-attention head that attends to all keys alike"),
        ("n_others", len(others(followed, softmax)), "1", "other softmax heads of the followed heads' layers"),
    )
    return {key: Variable((), value, units, text) for key, value, units, text in scalars}


def _heads(
    layers: Any, measured: Measured, values: dict[str, np.ndarray], softmax: np.ndarray, followed: list[Head]
) -> Dataset:
    """Means over prompts for every head, and per kv group."""
    mass, entropy = measured.mass.mean(1), measured.entropy.mean(1)
    succeeded = values["success"].sum(1)[:, None, None]
    copied = np.nansum(measured.copy, axis=1) / np.where(succeeded, succeeded, np.nan)
    rank = np.zeros(softmax.shape, int)
    for index, head in enumerate(followed):
        rank[head] = index + 1
    tables = {
        "choosing_mass": (measured.choosing.mean(1), "mass on the needle's value, on the choosing prompts"),
        "mass": (mass, "attention mass on the needle's value from the query position"),
        "entropy": (entropy, "entropy / log(visible keys), over the last four positions before the answer"),
        "sink_mass": (values["sink_mass"].mean(1), "weight of learned sinks; NaN: none"),
        "copy": (np.where(softmax, copied, np.nan), "copy score over the prompts that greedy decoding solved"),
        "query_distance": (values["query_distance"], "||W_Q - W_Q(last)|| / ||W_Q(last)||, the head's rows"),
        "key_distance": (values["key_distance"], "||W_K - W_K(last)|| / ||W_K(last)||, its kv group's rows"),
        "distance": (measured.distance, "query_distance + key_distance"),
        "recurrent_mass": (np.where(softmax, np.nan, values["mass"].mean(1)), "|W| share on the value; NaN: softmax"),
        "recurrent_entropy": (np.where(softmax, np.nan, values["entropy"].mean(1)), "of the shares of |W|"),
    }
    variables = {key: Variable(PER_HEAD, table, "1", text) for key, (table, text) in tables.items()}
    variables |= _kv_group_tables(layers, {"mass": mass, "entropy": entropy})
    n_heads = softmax.shape[1]
    per_head = {
        "softmax": (softmax, "1", "head of softmax attention; only these can be followed"),
        "kind": (kinds_of(layers, n_heads), "", "kind of the head's path; empty: the layer has no such head"),
        "kv_group_of_head": (kv_groups(layers, n_heads), "1", "kv group of the head; -1: none"),
        "rank": (rank, "1", "place among the followed heads, 1 is first; 0: not followed"),
    }
    variables |= {key: Variable(("layer", "head"), *fields) for key, fields in per_head.items()}
    windows = [np.nan if layer.window is None else layer.window for layer in layers]
    variables["window"] = Variable(("layer",), windows, "token", "window of the layer's sliding path; NaN: none")
    variables["n_success"] = Variable(CHECKPOINT, values["success"].sum(1), "1", "prompts that decoding solved")
    coords = {"layer": Variable(("layer",), np.arange(len(layers)), "1", "absolute layer id")}
    return Dataset(variables, coords, "NaN: no softmax (recurrent_*: softmax), no such head, or undefined")


def _kv_group_tables(layers: Any, tables: dict[str, np.ndarray]) -> dict[str, Variable]:
    dims = ("checkpoint", "layer", "kv_group")
    return {
        f"{key}_group_{how}": Variable(
            dims, by_kv_groups(table, layers, how), "1", f"{key}, {how} over the query heads of the kv group"
        )
        for key, table in tables.items()
        for how in ("mean", "max")
    }


def _prompts(plan: Any, name: str, values: dict[str, np.ndarray], softmax: np.ndarray) -> Dataset:
    """Per-prompt values, so that intervals can be computed anew."""
    prompts = plan.traced(name)
    per_head = ("checkpoint", "prompt", "layer", "head")
    fields = {
        "correct": (("checkpoint", "prompt"), "1", "1 if all digits are the argmax, teacher-forced"),
        "digits": (("checkpoint", "prompt"), "1", "share of digits right, teacher-forced"),
        "loss": (("checkpoint", "prompt"), "nat", "mean loss of the answer's tokens"),
        "success": (("checkpoint", "prompt"), "1", "1 if greedy decoding gives the answer, and so the value"),
        "mass": (per_head, "1", "attention mass on the value (recurrent heads: share of |W|)"),
        "entropy": (per_head, "1", "normalised entropy"),
        "copy": (per_head, "1", "copy score; NaN: not successful, or no softmax"),
    }
    variables = {key: Variable(dims, values[key].astype(np.float32), *text) for key, (dims, *text) in fields.items()}
    distance = prompts.answer[:, 0] - prompts.value[:, 0]
    variables["distance_to_value"] = Variable(("prompt",), distance, "token", "from the value to the answer")
    variables["first_value_token"] = Variable(("prompt",), prompts.value[:, 0], "token", "position of the value")
    return Dataset(variables, {}, "Tracing prompts; none of them chose a head")
