"""Probe results as datasets and back: what a result file keeps of every probe, all but its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from analyses.result import Dataset, Variable
from probes.layerwise import LayerwiseResult

TRAINED, SHUFFLED_LABELS, RANDOM_WEIGHTS = "trained", "shuffled labels", "random weights"
PER_PROBE = {  # dims, type, units and description of what each probe has of its own
    "label": (("sample",), np.int8, "1", "class of the held-out prompt, an index along class; permuted if shuffled"),
    "predicted": (("feature", "sample"), np.int8, "1", "predicted class, an index along class; -1: not fitted"),
    "log_p_true": (("feature", "sample"), np.float32, "nat", "log probability of the true class"),
    "converged": (("feature",), np.bool_, "1", "gradient below the tolerance"),
    "n_iter": (("feature",), np.int64, "1", "iterations of the fit"),
    "gradient": (("feature",), np.float64, "nat", "largest gradient of the objective / (C x training prompts)"),
    "objective": (("feature",), np.float64, "nat", "value of the objective on the training part"),
    "n_constant": (("feature",), np.int64, "1", "columns that are constant in the training part: weight 0"),
    "reason": (("feature",), None, "", "why the feature could not be fitted; empty: it was"),
}  # fmt: skip
SHARED = {
    "prompt": (("sample",), np.int64, "1", "number of the held-out prompt"),
    "frequencies": (("class",), np.float64, "1", "share of the class in the training part"),
}


def to_dataset(result: LayerwiseResult) -> Dataset:
    """One probe result; log_p_true is rounded to fp32."""
    arrays, metadata = result.to_arrays()
    arrays["reason"] = np.array(metadata["reason"], dtype=str)
    variables = {
        name: Variable(dims, np.asarray(arrays[name]).astype(kind) if kind else arrays[name], units, text)
        for name, (dims, kind, units, text) in (PER_PROBE | SHARED).items()
    }
    settings = {**metadata["settings"], "device": metadata["settings"]["device"].split(":")[0]}
    shuffled = settings.pop("shuffled")
    variables["settings"] = Variable((), json.dumps(settings, sort_keys=True), "", "of the fit, as JSON")
    variables["shuffled"] = Variable((), int(shuffled), "1", "1: labels were permuted")
    coords = {
        "feature": Variable(("feature",), list(result.names), "", "what was probed, at the probed token"),
        "sample": Variable(("sample",), result.row, "1", "number of the held-out prompt"),
        "class": Variable(("class",), [str(c) for c in result.classes], "", "value of the needle"),
    }
    return Dataset(variables, coords)


def stack(parts: Mapping[str, Dataset]) -> Dataset:
    """Results {control: dataset} of one haystack along a new dim `control`; they share prompts and split."""
    first = next(iter(parts.values()))
    variables = {}
    for name in (*PER_PROBE, "shuffled"):
        one = first.variables[name]
        values = np.stack([part[name] for part in parts.values()])
        variables[name] = Variable(("control", *one.dims), values, one.units, one.description)
    for name in (*SHARED, "settings"):
        assert all(np.array_equal(part[name], first[name]) for part in parts.values()), name
        variables[name] = first.variables[name]
    text = "trained: the checkpoint; shuffled labels: the same features; random weights: its architecture untrained"
    return Dataset(variables, {"control": Variable(("control",), list(parts), "", text), **first.coords})


def probe_result(group: Dataset, control: str = TRAINED) -> LayerwiseResult:
    """The probes of one control out of a group NAME/HAYSTACK of a result file, for layer_gains, share_of_gain, ...

    >>> probe_result(store.read("layerwise_probing.h5").groups["swa-512/repeat"]).accuracy_interval()
    """
    row = [str(name) for name in group["control"]].index(control)
    arrays: dict[str, Any] = {name: group[name][row] for name in PER_PROBE if name != "reason"}
    arrays |= {name: group[name] for name in SHARED}
    arrays["row"] = group["sample"]
    arrays["label"], arrays["predicted"] = (arrays[name].astype(np.int64) for name in ("label", "predicted"))
    arrays["log_p_true"] = arrays["log_p_true"].astype(np.float64)
    metadata = {
        "names": [str(name) for name in group["feature"]],
        "classes": [str(name) for name in group["class"]],
        "reason": [str(reason) for reason in group["reason"][row]],
        "settings": {**json.loads(str(group["settings"])), "shuffled": bool(group["shuffled"][row])},
    }
    return LayerwiseResult.from_arrays(arrays, metadata)
