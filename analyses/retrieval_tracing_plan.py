"""The units of a tracing study, and how one is computed: every checkpoint of a run, then ablations on its last one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
from analyses import provenance
from analyses import retrieval_tracing as study
from analyses import retrieval_tracing_measures as measures
from analyses.checkpoints import DTYPES, kernel_impl, torch_device, working_dtype
from analyses.result import Dataset, Variable
from analyses.retrieval_heads import Head, chosen, heads_of
from analyses.retrieval_prompts import RetrievalPrompts, needle_prompts, read_prompts
from analyses.run_checkpoints import Run, find_runs
from analyses.units import Stage
from models.errors import InputError
from models.safetensors_files import read_json

PAIR = 2
"""Heads ablated together: the top two, and random pairs beside them."""
Load = Callable[[str], Dataset]


@dataclass(frozen=True)
class CheckpointUnit:
    """Everything that is measured on one checkpoint without an edit."""

    run: str
    checkpoint: str

    @property
    def id(self) -> str:
        return f"{self.run}/{self.checkpoint}"


@dataclass(frozen=True)
class AblationUnit:
    """Single heads of one layer of the last checkpoint; layer None: the top two, and random pairs."""

    run: str
    layer: int | None

    @property
    def id(self) -> str:
        return f"{self.run}/ablated {'pairs' if self.layer is None else f'heads of layer {self.layer}'}"


class Plan:
    """Everything a run has decided before a model computes: runs, prompts, settings. Bad input ends here."""

    def __init__(self, config: study.Config, device: str):
        self.config = config
        self.device = torch_device(config.device or device)
        self.on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        if config.dtype not in DTYPES:
            raise InputError(f"--dtype is {config.dtype!r}; expected float32, bfloat16 or float16")
        self.runs = find_runs(config.paths, config.trust_remote_code)
        self.query, self.top = config.resolved_query(), config.resolved_top()
        self.draws = config.draws if config.draws is not None else self._default(study.CPU_DRAWS, study.GPU_DRAWS)
        for name, run in self.runs.items():
            self._check(name, run)
        self._loaded: tuple[Path, Any] | None = None
        self._made: dict[tuple[str, int], RetrievalPrompts] = {}
        self.prompts = {name: self._prompts(run) for name, run in self.runs.items()}
        self.choosing = self._choosing()

    def _default(self, on_cpu: int, on_gpu: int) -> int:
        return on_gpu if self.on_gpu else on_cpu

    def _check(self, name: str, run: Run) -> None:
        path = run.described.path
        if self.config.impl is not None and not run.described.native:
            raise InputError(f"--impl is {self.config.impl!r}, but {path} is no native checkpoint; leave it out")
        if self.config.impl is not None:
            models.load(path, device="meta", impl=self.config.impl)  # refuses an unknown one
        heads = len(heads_of(self.layers(name)))
        if self.config.top is not None and self.config.top > heads > 0:
            raise InputError(
                f"--top is {self.config.top}, but {path} has {heads} softmax heads; ask for no more than that"
            )
        if not heads:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in self.layers(name)))
            raise InputError(f"{path} has no softmax attention (its layers: {kinds}); there is no head to choose")
        if self.config.prompts is None and run.described.tokenizer is None:
            raise InputError(f"{path} has no tokenizer.json; needle prompts need one, or give --prompts FILE.npz")

    def _prompts(self, run: Run) -> RetrievalPrompts:
        """Those for choosing, then those for tracing; runs of one tokenizer and length share them."""
        config, described = self.config, run.described
        if config.prompts is not None:
            return self._own_prompts(run)
        longest = (
            described.context
            if self.on_gpu and described.native
            else self._default(study.CPU_LENGTH, study.FOREIGN_LENGTH)
        )
        length = config.length or min(described.context or 0, longest or 0)
        key = (described.tokenizer.sha256, length)
        if key not in self._made:
            n = (config.choosing or self._default(study.CPU_CHOOSING, study.GPU_CHOOSING)) + (
                config.tracing or self._default(study.CPU_TRACING, study.GPU_TRACING)
            )
            self._made[key] = needle_prompts(
                described.tokenizer, length=length, n=n, seed=config.seed, haystack=config.haystack
            )
        first = int(self._made[key].answer[:, 0].min())
        if first + self.query < 0:
            raise InputError(f"--query is {self.query}, but the prompts have {first} tokens before the answer")
        return self._made[key]

    def _own_prompts(self, run: Run) -> RetrievalPrompts:
        assert self.config.prompts is not None
        found = read_prompts(self.config.prompts)
        fields = read_json(run.described.path / "config.json")
        largest, vocab = int(found.ids.max()), (fields.get("text_config") or fields)["vocab_size"]
        if found.ids.min() < 0 or largest >= vocab:
            raise InputError(
                f"--prompts {self.config.prompts} holds token {largest}; {run.name} knows 0 to {vocab - 1}"
            )
        asked = (self.config.choosing or max(1, len(found.ids) // 3)) + (self.config.tracing or 1)
        if asked > len(found.ids):
            raise InputError(f"--prompts {self.config.prompts} has {len(found.ids)} prompts; {asked} are asked for")
        if int(found.answer[:, 0].min()) + self.query < 0:
            raise InputError(f"--query is {self.query}; the prompts of {self.config.prompts} are shorter")
        return found

    def _choosing(self) -> int:
        if self.config.prompts is None:
            return self.config.choosing or self._default(study.CPU_CHOOSING, study.GPU_CHOOSING)
        return self.config.choosing or max(1, len(next(iter(self.prompts.values())).ids) // 3)

    def chooses(self, run: str) -> RetrievalPrompts:
        """The prompts that choose heads, and give their mean outputs."""
        return self.prompts[run].select(0, self.choosing)

    def traced(self, run: str) -> RetrievalPrompts:
        """The prompts that everything reported is measured on; none of them chooses."""
        count = len(self.prompts[run].ids)
        last = count if self.config.tracing is None else min(count, self.choosing + self.config.tracing)
        return self.prompts[run].select(self.choosing, last)

    def layers(self, run: str) -> tuple[Any, ...]:
        """Of a run's model, without weights."""
        return self.runs[run].described.layers or ()

    def n_heads(self, run: str) -> int:
        return max(layer.n_heads for layer in self.layers(run))

    def dtype(self, run: str) -> str:
        return working_dtype(self.runs[run].described, self.config.dtype, self.on_gpu)

    def impl(self, run: str) -> str:
        return kernel_impl(self.runs[run].described, self.config.impl, self.device, self.dtype(run))

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings as resolved, content of checkpoints and prompts; not where files lie."""
        return provenance.configuration(
            self.config,
            exclude=(*provenance.RUN_FIELDS, "paths", "device", "prompts", "preset", "top", "query", "choosing",
                     "tracing", "length", "draws"),
            resolved_top=self.top,
            resolved_query=self.query,
            resolved_draws=self.draws,
            n_choosing=self.choosing,
            n_tracing={name: len(self.traced(name).ids) for name in self.runs},
            lengths={name: prompts.ids.shape[1] for name, prompts in self.prompts.items()},
            prompts_sha256={name: prompts.sha256 for name, prompts in self.prompts.items()},
            own_prompts=self.config.prompts is not None,
            checkpoints={name: provenance.checkpoint_sha256(path) for name, path in self._paths.items()},
            tokens={name: run.tokens for name, run in self.runs.items()},
            steps={name: run.steps for name, run in self.runs.items()},
            resolved_dtype={name: self.dtype(name) for name in self.runs},
            resolved_impl={name: self.impl(name) for name in self.runs},
            device_type=self.device.type,
            **provenance.trusted_code(self.config.trust_remote_code, self._paths),
        )  # fmt: skip

    @property
    def _paths(self) -> dict[str, Path]:
        return {f"{n}/{c}": path for n, run in self.runs.items() for c, path in run.checkpoints.items()}

    def attributes(self) -> dict[str, Any]:
        kinds = {name: [layer.kind for layer in self.layers(name.split("/")[0])] for name in self._paths}
        return provenance.run_attributes(
            checkpoints=self._paths,
            layer_kinds=kinds,
            kernel_impl=", ".join(dict.fromkeys(map(self.impl, self.runs))),
            dtype=", ".join(dict.fromkeys(map(self.dtype, self.runs))),
            device=self.device_name,
            seed=self.config.seed,
        )

    @property
    def stages(self) -> list[Stage]:
        """All checkpoints, in an order that loads each once, then the ablations."""
        traced = [CheckpointUnit(name, checkpoint) for name, run in self.runs.items() for checkpoint in run.checkpoints]
        stages = [Stage("checkpoints", {u.id: u for u in traced}, lambda u, load: self._trace(u))]
        if not self.config.no_ablation:
            stages.append(Stage("ablations", {u.id: u for n in self.runs for u in self.ablations(n)}, self._ablate))
        return stages

    def ablations(self, run: str) -> list[AblationUnit]:
        layers = dict.fromkeys(layer for layer, _ in heads_of(self.layers(run), None))
        return [*(AblationUnit(run, layer) for layer in layers), AblationUnit(run, None)]

    def last(self, run: str) -> str:
        """Id of the unit of a run's last checkpoint."""
        return CheckpointUnit(run, self.runs[run].last).id

    def chosen(self, choosing_mass: np.ndarray) -> list[Head]:
        """The heads to follow, by their mass [prompt, layer, head] on the last checkpoint."""
        return chosen(choosing_mass.mean(0), self.top, self.config.threshold)

    def _model(self, run: str, checkpoint: str) -> Any:
        """The model of a checkpoint; the one before is let go first, so that one is in memory at a time."""
        path = self.runs[run].checkpoints[checkpoint]
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = None
            dtype, trusted = DTYPES[self.config.dtype], self.config.trust_remote_code
            model = models.load(path, self.device, dtype, self.config.impl, trust_remote_code=trusted)
            self._loaded = (path, model)
        return self._loaded[1]

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one plan a process)
    def _means(self, run: str) -> Any:
        return measures.mean_outputs(self._model(run, self.runs[run].last), self.chooses(run))

    def _trace(self, unit: CheckpointUnit) -> Dataset:
        model, prompts = self._model(unit.run, unit.checkpoint), self.traced(unit.run)
        attention, answers = measures.trace(model, prompts, self.query)
        run = self.runs[unit.run]
        query, key, refusal = measures.distances(
            run.checkpoints[unit.checkpoint], run.described.path, *attention.softmax.shape
        )
        per_head = ("prompt", "layer", "head")
        values: dict[str, tuple[tuple[str, ...], Any, str]] = {
            "choosing_mass": (("choosing", "layer", "head"),
                              measures.choosing_mass(model, self.chooses(unit.run), self.query), "1"),
            "mass": (per_head, attention.mass, "1"),
            "entropy": (per_head, attention.entropy, "1"),
            "sink_mass": (per_head, attention.sink_mass, "1"),
            "copy": (per_head, attention.copy, "1"),
            "success": (("prompt",), attention.success.astype(float), "1"),
            "correct": (("prompt",), answers.correct.astype(float), "1"),
            "digits": (("prompt",), answers.digits, "1"),
            "loss": (("prompt",), answers.loss, "nat"),
            "query_distance": (("layer", "head"), np.where(attention.softmax, query, np.nan), "1"),
            "key_distance": (("layer", "head"), np.where(attention.softmax, key, np.nan), "1"),
            "distance_refusal": ((), refusal, ""),
        }  # fmt: skip
        return Dataset({name: Variable(dims, v, units, name) for name, (dims, v, units) in values.items()})

    def _ablate(self, unit: AblationUnit, load: Load) -> Dataset:
        model, prompts = self._model(unit.run, self.runs[unit.run].last), self.traced(unit.run)
        means = self._means(unit.run)  # of all heads whose output can be reached: some families hide a mixer's
        wanted = self._sets(unit, load)
        sets = [heads for heads in wanted if all(head in means for head in heads)]
        if unit.layer is None and sets[:1] != wanted[:1]:  # without the top two there is nothing to compare with
            sets = []
        found = measures.ablated(model, prompts, sets, means)
        heads = np.array([[*pair, *[(-1, -1)] * (PAIR - len(pair))] for pair in sets], int).reshape(-1, PAIR, 2)
        variables = {"heads": Variable(("set", "member", "place"), heads, "1", "(layer, head); -1: none")}
        for name, units in (("correct", "1"), ("digits", "1"), ("loss", "nat")):
            values = np.array([getattr(a, name) for a in found], float).reshape(len(sets), len(prompts.ids))
            variables[name] = Variable(("set", "prompt"), values, units, name)
        return Dataset(variables)

    def _sets(self, unit: AblationUnit, load: Load) -> list[tuple[Head, ...]]:
        """The sets of heads to ablate. Of pairs the first is the top two; empty where fewer than two were chosen."""
        if unit.layer is not None:
            return [(head,) for head in heads_of(self.layers(unit.run), None) if head[0] == unit.layer]
        followed = self.chosen(load(self.last(unit.run))["choosing_mass"])
        others = [head for head in heads_of(self.layers(unit.run), ("full",)) if head not in followed]
        if len(followed) < PAIR:
            return []
        pairs = [(one, two) for index, one in enumerate(others) for two in others[index + 1 :]]
        drawn = np.random.default_rng(self.config.seed).permutation(len(pairs))[: self.draws]
        return [tuple(followed[:PAIR]), *(pairs[index] for index in sorted(drawn.tolist()))]
