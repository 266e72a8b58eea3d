"""The checkpoints of training runs in order of tokens: one model a run, described without reading weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
from analyses.checkpoints import Checkpoint, describe
from models.errors import InputError
from models.safetensors_files import read_json

TRAINING = "training.json"
WRITTEN_BY = ("transformers_version", "_name_or_path")


@dataclass(frozen=True)
class Run:
    """Checkpoints {name: path} by rising tokens; `described` is the last one."""

    name: str
    checkpoints: dict[str, Path]
    tokens: tuple[float, ...]
    """Of training.json; NaN where a single checkpoint does not say."""
    steps: tuple[float, ...]
    described: Checkpoint

    @property
    def last(self) -> str:
        """Name of the checkpoint with the most tokens."""
        return list(self.checkpoints)[-1]


def find_runs(paths: Sequence[Path], trust_remote_code: bool = False) -> dict[str, Run]:
    """{name: run}: the directory's name, with its parents' where two would be alike.

    Native checkpoints or Hugging Face directories; several of one run must say in training.json how many tokens each
    has seen. Raises InputError for no run, checkpoints of several models in one directory, and equal or missing numbers
    of tokens; CheckpointError for damaged ones.
    """
    if not paths:
        raise InputError("no run given; name a directory with the checkpoints of a training run, or one checkpoint")
    places: dict[Path, Path] = {}
    for path in paths:
        models.find_checkpoints(path)  # refuses what is none
        places.setdefault(path.resolve(), path)
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    names = {place: "_".join(place.parts[-depth:]).strip("/") for place in places}
    return {names[place]: _run(names[place], given, trust_remote_code) for place, given in places.items()}


def _run(name: str, path: Path, trust_remote_code: bool) -> Run:
    found = models.find_checkpoints(path)
    shapes = {checkpoint.name: _shape(checkpoint) for checkpoint in found}
    first = shapes[found[0].name]
    for other, shape in shapes.items():
        if shape != first:
            fields = sorted(key for key in {*first, *shape} if first.get(key) != shape.get(key))
            raise InputError(
                f"{path} holds several models: {found[0].name} and {other} differ in {', '.join(fields)}; name the "
                "checkpoints of one training run, each run by a RUN of its own"
            )
    training = {checkpoint: _training(checkpoint, len(found) > 1) for checkpoint in found}
    ordered = sorted(found, key=lambda checkpoint: training[checkpoint]["tokens"])
    for one, two in itertools.pairwise(ordered):
        if training[one]["tokens"] == training[two]["tokens"]:
            tokens = int(training[one]["tokens"])
            raise InputError(f"{path}: {one.name} and {two.name} both have {tokens} tokens; keep one of them")
    described = [describe(checkpoint, trust_remote_code) for checkpoint in ordered]
    return Run(
        name,
        {checkpoint.name: checkpoint for checkpoint in ordered},
        tuple(training[checkpoint]["tokens"] for checkpoint in ordered),
        tuple(training[checkpoint]["step"] for checkpoint in ordered),
        described[-1],
    )


def _shape(checkpoint: Path) -> dict[str, Any]:
    """config.json without what says how, not what, was written."""
    return {key: value for key, value in read_json(checkpoint / "config.json").items() if key not in WRITTEN_BY}


def _training(checkpoint: Path, needed: bool) -> dict[str, float]:
    file = checkpoint / TRAINING
    fields: dict[str, Any] = read_json(file) if needed or file.exists() else {}
    tokens, step = fields.get("tokens"), fields.get("step")
    if needed and (not isinstance(tokens, int | float) or not 0 <= tokens < float("inf")):
        raise InputError(f"{file}: tokens is {tokens!r}; expected the number of training tokens, 0 or more")
    return {"tokens": _number(tokens), "step": _number(step)}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
