"""The units of a probing study, and how one is computed: features of a batch of prompts, then the probes on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import models
from analyses import layerwise_probing as study
from analyses import provenance, texts
from analyses.checkpoints import DTYPES, Checkpoint, batches, kernel_impl, named, torch_device, usable, working_dtype
from analyses.features import extract, mean_embedding
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, SHUFFLED_LABELS, TRAINED, to_dataset
from analyses.probing_prompts import ProbingPrompts, depth_bins
from analyses.random_weights import untrained
from analyses.result import Dataset, Variable
from analyses.units import Stage
from models.errors import InputError
from models.safetensors_files import read_json
from probes import layerwise, niah
from probes.layerwise.labels import design

CPU_UNIT, GPU_UNIT_TOKENS = 64, 2**22  # prompts of a unit on a CPU, tokens of one on a GPU: seconds of work
FIT_BYTES = 8e9  # of standardised features at once on a GPU; fixed, since probes fitted together share rounding
MEAN_EMBEDDING, NEEDLE_DEPTH = "mean embedding", "needle depth"


@dataclass(frozen=True)
class Extraction:
    """Features of prompts first .. last - 1. `weights` is "trained" or "random weights"."""

    checkpoint: str
    haystack: str
    weights: str
    first: int
    last: int

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.haystack}/{self.weights} {self.first}-{self.last}"


@dataclass(frozen=True)
class Fitting:
    """Probes on all features of one checkpoint, haystack and control."""

    checkpoint: str
    haystack: str
    control: str

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.haystack}/{self.control} probes"


class Plan:
    """Everything a run has decided before a model computes: checkpoints, lengths, prompts. Bad input ends here."""

    def __init__(self, config: study.Config, device: str):
        self.config = config
        self.device = torch_device(config.device or device)
        self.on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        if config.dtype not in DTYPES:
            raise InputError(f"--dtype is {config.dtype!r}; expected float32, bfloat16 or float16")
        self.n = config.resolved("samples") or (study.GPU_SAMPLES if self.on_gpu else study.CPU_SAMPLES)
        self.C = config.resolved("C") or study.C
        self.classifier = config.resolved("classifier") or study.CLASSIFIER
        self.test_size = config.resolved("test_size") or (study.TEST_SIZE if self.on_gpu else study.CPU_TEST_SIZE)
        classes = config.resolved("classes") or study.CLASSES
        self.values = niah.VALUE_SETS[config.resolved("values") or study.VALUES][:classes]
        named_haystacks = study.GPU_HAYSTACKS if self.on_gpu else study.CPU_HAYSTACKS
        self.haystacks = list(dict.fromkeys(config.resolved("haystack") or named_haystacks))
        if config.texts is not None and "essay" not in self.haystacks:
            raise InputError(f"--texts is given, but --haystack is {' '.join(self.haystacks)}; add essay")
        self.documents = {t.name: t.content for t in texts.read_texts(config.texts)} if config.texts else None
        found, trusted = named(config.paths), config.trust_remote_code
        self.checkpoints = {name: usable(path, config.impl, "prompts", trusted) for name, path in found.items()}
        self.dtypes = {name: working_dtype(c, config.dtype, self.on_gpu) for name, c in self.checkpoints.items()}
        self.lengths = {name: self._length(checkpoint) for name, checkpoint in self.checkpoints.items()}
        self._made: dict[tuple[str, str, int], ProbingPrompts] = {}
        self.prompts = {(n, h): self._prompts(n, h) for n in self.checkpoints for h in self.all_haystacks}
        self.loaded_kinds: dict[str, list[str]] = {}  # from the units that loaded the models
        self._check_split()

    @property
    def all_haystacks(self) -> list[str]:
        return [*self.haystacks, study.NULL] if study.NULL in self.config.controls else self.haystacks

    def _length(self, checkpoint: Checkpoint) -> int:
        context = checkpoint.context
        if self.config.length is None and context is None:
            raise InputError(f"{checkpoint.path}: its config.json names no context length; choose with --length")
        return self.config.length or (context or 0 if self.on_gpu else min(context or 0, study.CPU_LENGTH))

    def _prompts(self, name: str, haystack: str) -> ProbingPrompts:
        """Those of one tokenizer and length (steps of a run) are made once."""
        checkpoint, length = self.checkpoints[name], self.lengths[name]
        key = (checkpoint.tokenizer.sha256, haystack, length)
        if key not in self._made:
            try:
                self._made[key] = ProbingPrompts(
                    checkpoint.tokenizer, haystack=haystack, length=length, n=self.n, seed=self.config.seed,
                    values=self.values, documents=self.documents,
                    after_shared=self.config.resolved("after_shared"), depth=self.config.depth,
                    form=self.config.form, distractors=self.config.distractors,
                )  # fmt: skip
                self._made[key].batch(0, min(self.n, len(self.values)))
            except ValueError as error:
                raise InputError(f"{checkpoint.path}, {haystack}: {error}") from error
        return self._made[key]

    def _check_split(self) -> None:
        """The split of the fits, tried before anything is computed."""
        try:
            design(self.labels(), None, self.n, test_size=self.test_size, seed=self.config.seed, shuffled=False)
        except ValueError as error:
            raise InputError(f"--samples {self.n} at --test-size {self.test_size}: {error}") from error

    def labels(self) -> list[str]:
        return [self.values[index % len(self.values)] for index in range(self.n)]

    @property
    def dtype(self) -> str:
        return ", ".join(dict.fromkeys(self.dtypes.values()))

    def impl(self, name: str) -> str:
        return kernel_impl(self.checkpoints[name], self.config.impl, self.device, self.dtypes[name])

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings as resolved, content of checkpoints and texts; not where files lie."""
        resolved = ("preset", "samples", "length", "haystack", "values", "classes", "after_shared", "classifier", "C",
                    "test_size")  # fmt: skip
        return provenance.configuration(
            self.config,
            exclude=(*provenance.RUN_FIELDS, "paths", "device", "texts", *resolved),
            samples=self.n,
            lengths=self.lengths,
            haystacks=self.haystacks,
            needle_values=self.values,
            answer_tokens_given={name: self.prompts[name, self.haystacks[0]].given for name in self.checkpoints},
            resolved_classifier=self.classifier,
            resolved_C=self.C,
            resolved_test_size=self.test_size,
            prompt_hashes={f"{name}/{haystack}": made.hashes for (name, haystack), made in self.prompts.items()},
            checkpoints={name: provenance.checkpoint_sha256(c.path) for name, c in self.checkpoints.items()},
            resolved_dtype=self.dtype,
            resolved_impl={name: self.impl(name) for name in self.checkpoints},
            device_type=self.device.type,
            **provenance.trusted_code(self.config.trust_remote_code, {n: c.path for n, c in self.checkpoints.items()}),
        )

    def attributes(self) -> dict[str, Any]:
        return provenance.run_attributes(
            checkpoints={name: checkpoint.path for name, checkpoint in self.checkpoints.items()},
            layer_kinds=self.loaded_kinds,
            kernel_impl=", ".join(dict.fromkeys(map(self.impl, self.checkpoints))),
            dtype=self.dtype,
            device=self.device_name,
            seed=self.config.seed,
        )

    def controls(self, haystack: str) -> list[str]:
        """What is fitted on a haystack."""
        if haystack == study.NULL:
            return [TRAINED]
        asked = {study.SHUFFLED: SHUFFLED_LABELS, study.RANDOM: RANDOM_WEIGHTS}
        return [TRAINED, *(label for control, label in asked.items() if control in self.config.controls)]

    def extractions(self, name: str, haystack: str, weights: str) -> list[Extraction]:
        """In order of prompts. Checkpoints of one architecture and tokenizer share their untrained twin."""
        owner = name if weights == TRAINED else self._twins[name]
        size = max(CPU_UNIT, GPU_UNIT_TOKENS // self.lengths[owner]) if self.on_gpu else CPU_UNIT
        return [Extraction(owner, haystack, weights, *rows) for rows in batches(self.n, size)]

    @functools.cached_property
    def _twins(self) -> dict[str, str]:
        """The first checkpoint of the same architecture, tokenizer, dtype and length."""
        first: dict[str, str] = {}
        found = {}
        for name, checkpoint in self.checkpoints.items():
            shape = read_json(checkpoint.path / "config.json")
            code = provenance.trusted_code(self.config.trust_remote_code, {"code": checkpoint.path})
            key = provenance.canonical(
                [shape, code, checkpoint.tokenizer.sha256, self.dtypes[name], self.lengths[name]]
            )  # fmt: skip
            found[name] = first.setdefault(key, name)
        return found

    @property
    def stages(self) -> list[Stage]:
        """Features, in an order that loads each model once, then probes."""
        extractions = [
            unit
            for name in self.checkpoints
            for weights in (TRAINED, RANDOM_WEIGHTS)
            for haystack in self.all_haystacks
            if weights in self.controls(haystack)
            for unit in self.extractions(name, haystack, weights)
        ]
        fittings = [
            Fitting(name, haystack, control)
            for name in self.checkpoints
            for haystack in self.all_haystacks
            for control in self.controls(haystack)
        ]
        return [
            Stage("features", {unit.id: unit for unit in extractions}, lambda unit, load: self._extract(unit)),
            Stage("probes", {unit.id: unit for unit in fittings}, self._fit),
        ]

    def _extract(self, unit: Extraction) -> Dataset:
        model = self._model(unit.checkpoint, unit.weights)
        batch = self.prompts[unit.checkpoint, unit.haystack].batch(unit.first, unit.last)
        found = extract(model, batch.ids, share_prefix=not self.config.whole_prompts)
        windows = [float("nan") if layer.window is None else float(layer.window) for layer in model.layers]
        variables = {
            "features": Variable(("sample", "feature", "width"), found.values[:, 0], "1", "residual stream"),
            MEAN_EMBEDDING: Variable(("sample", "width"), mean_embedding(model, batch.ids), "1", "of the prompt"),
            "label": Variable(("sample",), batch.label, "1", "class"),
            "needle": Variable(("sample",), batch.needle, "token", "first token of the value inside the prompt"),
            "computed": Variable((), found.computed, "token", "tokens forwarded"),
            "kind": Variable(("layer",), [layer.kind for layer in model.layers], "", "kind of each layer"),
            "window": Variable(("layer",), windows, "token", "window of its sliding path"),
        }
        coords = {
            "feature": Variable(("feature",), list(found.names), "", "hook point"),
            "sample": Variable(("sample",), np.arange(unit.first, unit.last), "1", "number of the prompt"),
        }
        return Dataset(variables, coords)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one plan a process)
    def _model(self, name: str, weights: str) -> Any:
        path, dtype = self.checkpoints[name].path, DTYPES[self.dtypes[name]]
        impl, trusted = self.config.impl, self.config.trust_remote_code
        if weights == TRAINED:
            return models.load(path, self.device, dtype, impl, trust_remote_code=trusted)
        return untrained(
            path, seed=self.config.seed, device=self.device, dtype=dtype, impl=impl, trust_remote_code=trusted
        )

    def _fit(self, unit: Fitting, load: Callable[[str], Dataset]) -> Dataset:
        weights = RANDOM_WEIGHTS if unit.control == RANDOM_WEIGHTS else TRAINED
        parts = [load(part.id) for part in self.extractions(unit.checkpoint, unit.haystack, weights)]
        stream = np.concatenate([part["features"] for part in parts])
        needle, label = (np.concatenate([part[key] for part in parts]) for key in ("needle", "label"))
        assert [self.values[index] for index in label] == self.labels()
        features = {str(name): stream[:, i] for i, name in enumerate(parts[0]["feature"])}
        features[MEAN_EMBEDDING] = np.concatenate([part[MEAN_EMBEDDING] for part in parts])
        features[NEEDLE_DEPTH] = depth_bins(needle, self.lengths[unit.checkpoint])
        result = layerwise.fit(
            features, self.labels(), classifier=self.classifier, C=self.C, test_size=self.test_size,
            seed=self.config.seed, shuffled=unit.control == SHUFFLED_LABELS, device=self.device,
            layers_at_once=max(1, int(FIT_BYTES // (16 * stream[:, 0].size))) if self.on_gpu else None,
        )  # fmt: skip
        computed = sum(int(part["computed"]) for part in parts)
        more = {
            "needle": Variable(("sample",), needle[result.row], "token", parts[0].variables["needle"].description),
            "computed": Variable((), computed, "token", "forwarded for these features"),
            **{key: parts[0].variables[key] for key in ("kind", "window")},
        }
        found = to_dataset(result)
        return Dataset({**found.variables, **more}, found.coords)
