"""The units of a scaling-law study, and how one is computed: architecture x law x points fitted; the joint laws."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyses import provenance, scaling_runs
from analyses import scaling_law_datasets as datasets
from analyses.result import Dataset
from analyses.scaling_law import Config
from analyses.scaling_points import SUFFIXES, Points, read_table
from models.errors import InputError
from probes import scaling
from probes.scaling.fitting import checked_bounds
from probes.scaling.identifiability import DISTINCT, distinct
from probes.scaling.law import names_of

JOINT = "joint"
LAWS = {"no constant": False, "with constant": True}
RELEASED, RELEASED_BOUNDS = "released fit", "released bounds"


@dataclass(frozen=True)
class Unit:
    """One fit. `law` is a key of LAWS, RELEASED or RELEASED_BOUNDS; `held_out`: the largest model is not fitted."""

    architecture: str
    law: str
    held_out: bool

    @property
    def label(self) -> str:
        return f"{self.law}, {'largest N held out' if self.held_out else 'all points'}"

    @property
    def id(self) -> str:
        return f"{self.architecture}/{self.law if self.architecture == JOINT else self.label}"


class Plan:
    """Everything a run has decided before a law is fitted. Bad input ends here."""

    def __init__(self, config: Config):
        self.config = config
        self.points, self.from_runs = _read(config)
        self.bounds = {name: value for name in ("alpha", "beta") if (value := getattr(config, name)) is not None}
        try:
            checked_bounds(self.bounds, constant=False)
        except ValueError as error:
            raise InputError(f"--alpha or --beta: {error}") from error
        self.architectures = {_group(name): name for name in dict.fromkeys(self.points.architecture)}
        if len(self.architectures) < len(set(self.points.architecture)) or JOINT in self.architectures:
            listed = ", ".join(sorted(set(self.points.architecture)))
            raise InputError(f"architectures {listed}: two names are alike, or one is {JOINT!r}; rename one")
        for group, name in self.architectures.items():
            count, least = len(self.of(group).n), len(names_of(False)) + 1
            if count < least:
                raise InputError(f"architecture {name!r} has {count} points; expected {least} or more for a law")
        if config.over == "runs" and not all(self.points.run):
            raise InputError("--over runs needs the run of every point; give runs, or a table with a column run")

    def of(self, group: str) -> Points:
        """The points of an architecture."""
        return self.points.where([name == self.architectures[group] for name in self.points.architecture])

    def held_out(self, group: str) -> np.ndarray:
        """Mask of the largest model's points; none where what is left has fewer than 2 sizes or too few points."""
        n = self.of(group).n
        largest = n >= n.max() / (1 + DISTINCT)
        rest = n[~largest]
        usable = len(rest) > len(names_of(False)) and distinct(rest) >= 2
        return largest if usable else np.zeros(len(n), bool)

    def fitted(self, unit: Unit) -> np.ndarray:
        """Mask of the points that a unit fits."""
        count = len(self.of(unit.architecture).n)
        return ~self.held_out(unit.architecture) if unit.held_out else np.ones(count, bool)

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        found = []
        for group in self.architectures:
            splits = [True, False] if self.held_out(group).any() else [False]
            units = [Unit(group, law, split) for split in splits for law in LAWS]
            if self.config.released:
                units += [Unit(group, law, splits[0]) for law in (RELEASED, RELEASED_BOUNDS)]
            found += [unit for unit in units if self.fitted(unit).sum() > len(names_of(LAWS.get(unit.law, False)))]
        if len(self.architectures) > 1:
            fewest = min(len(self.of(group).n) for group in self.architectures)
            found += [Unit(JOINT, law, False) for law, constant in LAWS.items() if fewest > len(names_of(constant))]
        return {unit.id: unit for unit in found}

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings and the content of the points, not where files lie."""
        excluded = ("out", "overwrite", "paths", "loss_column", "perplexity", "last", "min_tokens")
        return provenance.configuration(self.config, exclude=excluded, points_sha256=self.points.sha256)

    def attributes(self) -> dict[str, Any]:
        paths = [str(path) for path in self.config.paths]
        return {
            "input": paths[0] if len(paths) == 1 else paths,
            "points_sha256": self.points.sha256,
            "kernel_impl": "numpy",
            "dtype": "float64",
            "device": "cpu",
            "seed": self.config.seed,
            "scipy": importlib.metadata.version("scipy"),
        }

    def compute(self, unit: Unit) -> Dataset:
        config = self.config
        if unit.architecture == JOINT:
            return datasets.joint(self.points, LAWS[unit.law], config.delta, config.joint_resamples, config.seed)
        points, chosen = self.of(unit.architecture), self.fitted(unit)
        fitted = points.where(chosen)
        data = (fitted.n, fitted.d, fitted.loss)
        if unit.law == RELEASED:
            return datasets.single(scaling.fit_released(*data), points, chosen)
        bounds = scaling.RELEASED_BOUNDS if unit.law == RELEASED_BOUNDS else self.bounds
        found = scaling.fit(*data, constant=LAWS.get(unit.law, False), delta=config.delta, bounds=bounds)
        over: Any = {"within-n": "within_n", "points": "points"}.get(config.over, fitted.run)
        sampled = scaling.bootstrap(found, resamples=config.resamples, seed=config.seed, over=over)
        profiles = [scaling.profile(found, name, level=config.level) for name in found.parameters]
        return datasets.single(found, points, chosen, sampled, profiles)


def _read(config: Config) -> tuple[Points, bool]:
    """All points, and whether any come from runs."""
    if not config.paths:
        raise InputError("no points given; name a table (TSV, CSV) or runs of models.pretrain")
    rows, from_runs = [], False
    for path in config.paths:
        if path.is_dir():
            from_runs = True
            for run in scaling_runs.find_runs(path):
                rows += scaling_runs.read_run(run, config.last).rows
        elif path.is_file():
            rows += read_table(path, config.loss_column, config.perplexity).rows
        else:
            raise InputError(f"{path}: no such file or folder; give a table (TSV, CSV) or runs of models.pretrain")
    least = token_count(config.min_tokens)
    kept = Points.of([row for row in rows if row[1] >= least])
    if not len(kept.n):
        most = max(row[1] for row in rows)
        raise InputError(f"--min-tokens is {config.min_tokens}; the point with most tokens has {most:.4g}, give fewer")
    return kept, from_runs


def token_count(text: str) -> float:
    """130M -> 1.3e8; InputError for anything but a number >= 0 with an optional K, M or B."""
    factor = SUFFIXES.get(text.lower()[-1:], 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise InputError(f"--min-tokens is {text!r}; expected a number of tokens such as 2000000 or 2M")
    return value


def _group(name: str) -> str:
    """An architecture's name as that of a group of the file."""
    return name.replace("/", "_").strip(". ") or "unnamed"
