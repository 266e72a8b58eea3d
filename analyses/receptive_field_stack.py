"""Summaries of several receptive-field studies of the same checkpoints in one small file, stacked along checkpoint.

    python -m analyses.receptive_field_stack sweep=results/sweep.h5 prose=results/prose.h5 --out controls.h5

A result keeps a group of many small arrays for every checkpoint, most of whose room is HDF5's bookkeeping. Here every
summary is one array over checkpoints, floats as float32; values of single documents and prompts stay in the results.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from models import command_line
from models.command_line import shown
from models.errors import InputError

if TYPE_CHECKING:
    from analyses.result import Dataset, Result

MAIN = (
    "log_long_ppl", "log_long_ppl_harm*", "first_loss_harm*", "interval_loss_harm*", "excess_harm*", "loss",
    "loss_harm*", "niah*", "repeat_beyond_harm*", "n_repeats_beyond", "vacuous", "reach", "status", "restricted_*",
    "multiple", "extrapolation", "largest_effect",
)  # fmt: skip
REPEATS = ("repeat_loss", "repeat_harm*", "n_repeats")
ONE_LENGTH = {"": MAIN, "needles": ("*",), "repeats": REPEATS, "matching": ("before", "after")}
LENGTHS = {"lengths": MAIN, "lengths/repeats": REPEATS}  # what else there is, is in these at the first length
SHARED = ("config", "run_sha256", "time", "git_commit", "n_documents", "n_prompts")
COMMON = ("device", "dtype", "kernel_impl", "margin", "seed")


@dataclass(frozen=True)
class Config:
    """Stack the summaries of studies, results of analyses.receptive_field."""

    studies: Annotated[tuple[str, ...], tyro.conf.Positional, shown("NAME=FILE [NAME=FILE ...]")]
    """Name of each study in the new file, and its result."""
    out: Path = Path("results/receptive_field_controls.h5")
    """The new file (HDF5)."""


def stacked(results: Mapping[str, Result]) -> Result:
    """Groups STUDY and STUDY/PART, each array with a leading dim checkpoint unless all checkpoints share it.

    InputError for a result of another analysis, or if checkpoints of one study were measured under other conditions.
    """
    from analyses.result import Result

    groups, about = {}, {}
    for study, result in results.items():
        if result.attributes.get("analysis") != "receptive_field":
            found = result.attributes.get("analysis")
            raise InputError(f"{study}: a result of {found!r}; expected one of analyses.receptive_field")
        names = [name for name in result.groups if "/" not in name]
        parts = LENGTHS if f"{names[0]}/lengths" in result.groups else ONE_LENGTH
        for part, patterns in parts.items():
            own = [result.groups.get(f"{name}/{part}".rstrip("/")) for name in names]
            if all(own):
                groups[f"{study}/{part}".rstrip("/")] = _stack(study, names, own, patterns)  # type: ignore[arg-type]
        about[study] = {key: result.attributes[key] for key in SHARED if key in result.attributes}
        about[study]["config"] = json.loads(about[study]["config"])
    last = list(results.values())[-1].attributes
    attributes = {key: last[key] for key in COMMON if key in last}
    attributes |= {"analysis": "receptive_field controls", "studies": json.dumps(about, sort_keys=True)}
    attributes["left_out"] = "everything but summaries with their intervals"
    return Result(groups, attributes)


def _stack(study: str, names: list[str], own: list[Dataset], patterns: tuple[str, ...]) -> Dataset:
    import numpy as np

    from analyses.result import Dataset, Variable

    kept, coords = {}, {"checkpoint": Variable(("checkpoint",), names, "", "folder of the checkpoint")}
    for name, first in own[0].variables.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        values = [one[name] for one in own if name in one.variables]
        if len(values) != len(own) or len({x.shape for x in values}) != 1:
            raise InputError(f"{study}: {name} differs in shape between checkpoints; expected one command's result")
        floats = first.values.dtype.kind == "f"
        dims = first.dims
        if floats or any(not np.array_equal(x, values[0]) for x in values):
            dims, values = ("checkpoint", *dims), [np.stack(values)]
        data = values[0].astype(np.float32) if floats else values[0]
        kept[name] = Variable(dims, data, first.units, first.description)
    for dim, coord in own[0].coords.items():
        if any(dim in variable.dims for variable in kept.values()):
            if any(not np.array_equal(one[dim], coord.values) for one in own):
                raise InputError(f"{study}: checkpoints have other {dim}s; expected one command's result")
            coords[dim] = coord
    return Dataset(kept, coords, own[0].description)


def main(config: Config) -> None:
    from analyses import store

    pairs = [study.partition("=") for study in config.studies]
    if bad := [study for study, (name, _, path) in zip(config.studies, pairs, strict=True) if not name or not path]:
        raise InputError(f"study {bad[0]!r}; expected NAME=FILE, e.g. prose=results/prose.h5")
    store.write(config.out, stacked({name: store.read(path) for name, _, path in pairs}))
    print(config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog="python -m analyses.receptive_field_stack")
