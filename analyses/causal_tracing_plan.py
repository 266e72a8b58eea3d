"""The units of a causal-tracing study: patches, knockouts, the untrained twin, states; then the probes on these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import models
from analyses import causal_tracing as study
from analyses import provenance
from analyses.causal_knockouts import MEASURED, Set, knockout_sets, measure
from analyses.checkpoints import DTYPES, Checkpoint, batches, kernel_impl, named, torch_device, usable, working_dtype
from analyses.layerwise_probing_results import RANDOM_WEIGHTS, SHUFFLED_LABELS, TRAINED, to_dataset
from analyses.probing_prompts import ProbingPrompts
from analyses.random_weights import untrained
from analyses.result import Dataset, Variable
from analyses.state_features import extract_states, state_differences, state_layers
from analyses.units import Stage
from models.errors import InputError
from probes import layerwise, niah
from probes.patching import DIRECTIONS, ValueSwaps, activation_patching, logit_differences, value_swaps

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 32_768}
RECORDED_BYTES = 8e9  # of a batch's activations, clean and corrupted, which patching holds on the device
CPU_UNIT, GPU_UNIT = 4, 16  # pairs of a unit
CPU_STATES, GPU_STATES = 32, 128  # prompts of a unit
STATE_TOKENS = {"cpu": 4096, "cuda": 65_536}
TEST_SIZE = 0.5
DISTANCES = (0, 2, *(8 * 4**i for i in range(10)))
CONTROLS = (TRAINED, SHUFFLED_LABELS, RANDOM_WEIGHTS)
PATCHING, KNOCKOUT, BASELINE, STATES = "patching", "knockout", "untrained logits", "states"


@dataclass(frozen=True)
class Unit:
    """One part of one checkpoint on samples first .. last - 1, with the trained or the random weights."""

    checkpoint: str
    part: str
    weights: str
    first: int
    last: int

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.part}, {self.weights} {self.first}-{self.last}"


@dataclass(frozen=True)
class Fitting:
    """Probes of one checkpoint under one control."""

    checkpoint: str
    control: str

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.control} probes"


class Plan:
    """Everything a run has decided before a model computes: checkpoints, pairs, prompts. Bad input ends here."""

    def __init__(self, config: study.Config, device: str):
        self.config = config
        self.device = torch_device(config.device or device)
        self.on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        if config.dtype not in DTYPES:
            raise InputError(f"--dtype is {config.dtype!r}; expected float32, bfloat16 or float16")
        self.n_pairs = config.pairs or (study.GPU_PAIRS if self.on_gpu else study.CPU_PAIRS)
        samples = study.GPU_SAMPLES if self.on_gpu else study.CPU_SAMPLES
        self.n_samples = samples if config.samples is None else config.samples
        found, trusted = named(config.paths), config.trust_remote_code
        self.checkpoints = {name: usable(path, config.impl, "prompts", trusted) for name, path in found.items()}
        self.dtypes = {name: working_dtype(c, config.dtype, self.on_gpu) for name, c in self.checkpoints.items()}
        self.lengths = {name: self._length(checkpoint) for name, checkpoint in self.checkpoints.items()}
        self._made: dict[tuple[str, int], tuple[ValueSwaps, ProbingPrompts | None]] = {}
        for name in self.checkpoints:
            self._prompts(name)

    def _length(self, checkpoint: Checkpoint) -> int:
        context = checkpoint.context
        if self.config.length is None and context is None:
            raise InputError(f"{checkpoint.path}: its config.json names no context length; choose with --length")
        limit = study.CPU_LENGTH if not self.on_gpu else context if checkpoint.native else study.FOREIGN_LENGTH
        return self.config.length or min(context or 0, limit or 0)

    def _prompts(self, name: str) -> tuple[ValueSwaps, ProbingPrompts | None]:
        """Those of one tokenizer and length are made once."""
        checkpoint, length = self.checkpoints[name], self.lengths[name]
        key = (checkpoint.tokenizer.sha256, length)
        if key not in self._made:
            hard, seed = self.config.values == "hard", self.config.seed
            try:
                swaps = value_swaps(
                    checkpoint.tokenizer, length=length, n=self.n_pairs, seed=seed, haystack=self.config.haystack,
                    values=self.config.values, after_shared=hard,
                )  # fmt: skip
                probed = ProbingPrompts(
                    checkpoint.tokenizer, haystack=self.config.haystack, length=length, n=self.n_samples, seed=seed + 1,
                    values=niah.VALUE_SETS[self.config.values], after_shared=hard, depth=(0.0,),
                ) if self.n_samples else None  # fmt: skip
            except ValueError as error:
                raise InputError(f"{checkpoint.path}, {length} tokens of {self.config.haystack}: {error}") from error
            self._made[key] = swaps, probed
        return self._made[key]

    def swaps(self, name: str) -> ValueSwaps:
        """The pairs of a checkpoint."""
        return self._prompts(name)[0]

    def layers(self, name: str) -> tuple[Any, ...]:
        """Of a checkpoint, without weights."""
        return self.checkpoints[name].layers or ()

    def sets(self, name: str) -> list[Set]:
        """The knockouts of a checkpoint."""
        return knockout_sets(self.layers(name), self.config.layers_at_once, not self.config.no_heads)

    def distances(self, name: str) -> list[int]:
        """Tokens behind the value's first one at which states are probed; beside them, the last token."""
        _, probed = self._prompts(name)
        assert probed is not None
        room = self.lengths[name] - 1 - int(probed.batch(0, min(8, self.n_samples)).needle.max())
        return [distance for distance in DISTANCES if distance < room]

    def impl(self, name: str) -> str:
        return kernel_impl(self.checkpoints[name], self.config.impl, self.device, self.dtypes[name])

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings as resolved, content of checkpoints and prompts; not where files lie."""
        probed = {name: self._prompts(name)[1] for name in self.checkpoints}
        return provenance.configuration(
            self.config,
            exclude=(*provenance.RUN_FIELDS, "paths", "device", "pairs", "samples", "length"),
            n_pairs=self.n_pairs,
            n_samples=self.n_samples,
            lengths=self.lengths,
            pairs_sha256={name: self.swaps(name).sha256 for name in self.checkpoints},
            probing_prompts={name: prompts.hashes for name, prompts in probed.items() if prompts is not None},
            checkpoints={name: provenance.checkpoint_sha256(c.path) for name, c in self.checkpoints.items()},
            resolved_dtype=self.dtypes,
            resolved_impl={name: self.impl(name) for name in self.checkpoints},
            device_type=self.device.type,
            **provenance.trusted_code(self.config.trust_remote_code, {n: c.path for n, c in self.checkpoints.items()}),
        )

    def attributes(self) -> dict[str, Any]:
        return provenance.run_attributes(
            checkpoints={name: checkpoint.path for name, checkpoint in self.checkpoints.items()},
            layer_kinds={name: [layer.kind for layer in self.layers(name)] for name in self.checkpoints},
            kernel_impl=", ".join(dict.fromkeys(map(self.impl, self.checkpoints))),
            dtype=", ".join(dict.fromkeys(self.dtypes.values())),
            device=self.device_name,
            seed=self.config.seed,
        )

    def units(self, name: str, part: str, weights: str) -> list[Unit]:
        """In order of samples."""
        if part == STATES:
            cut = batches(self.n_samples, GPU_STATES if self.on_gpu else CPU_STATES)
        else:
            cut = batches(self.n_pairs, GPU_UNIT if self.on_gpu else CPU_UNIT)
        return [Unit(name, part, weights, *rows) for rows in cut]

    @property
    def stages(self) -> list[Stage]:
        """Everything that a model computes, in an order that loads each once, then probes."""
        parts = {TRAINED: (PATCHING, KNOCKOUT, STATES), RANDOM_WEIGHTS: (BASELINE, STATES)}
        units = [u for n in self.checkpoints for w, own in parts.items() for p in own for u in self.units(n, p, w)]
        stages = [Stage("measures", {unit.id: unit for unit in units}, lambda unit, load: self._compute(unit))]
        fittings = [Fitting(name, control) for name in self.checkpoints for control in CONTROLS]
        if self.n_samples:
            stages.append(Stage("probes", {unit.id: unit for unit in fittings}, self._fit))
        return stages

    def _compute(self, unit: Unit) -> Dataset:
        model = self._model(unit.checkpoint, unit.weights)
        return {PATCHING: self._patch, KNOCKOUT: self._knock_out, BASELINE: self._baseline, STATES: self._states}[
            unit.part
        ](unit, model)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one plan a process)
    def _model(self, name: str, weights: str) -> Any:
        path, dtype = self.checkpoints[name].path, DTYPES[self.dtypes[name]]
        impl, trusted = self.config.impl, self.config.trust_remote_code
        if weights == TRAINED:
            return models.load(path, self.device, dtype, impl, trust_remote_code=trusted)
        return untrained(
            path, seed=self.config.seed, device=self.device, dtype=dtype, impl=impl, trust_remote_code=trusted
        )

    def _batch(self, name: str, tokens: dict[str, int]) -> int:
        return max(1, tokens[self.device.type] // self.lengths[name])

    def _patch(self, unit: Unit, model: Any) -> Dataset:
        some, batch = self.swaps(unit.checkpoint).select(unit.first, unit.last), self._batch_of(unit, model)
        found = [
            activation_patching(model, some, way, heads=not self.config.no_heads, batch_size=batch)
            for way in DIRECTIONS
        ]
        per_layer, per_head = ("pair", "layer", "component", "position"), ("pair", "layer", "head", "position")
        return _dataset(
            clean=(("pair",), found[0].clean),
            corrupt=(("pair",), found[0].corrupt),
            layers=(("direction", *per_layer), np.stack([one.layers for one in found])),
            heads=(("direction", *per_head), np.stack([one.heads for one in found])),
            difference=self._difference(unit, model),
        )

    def _difference(self, unit: Unit, model: Any) -> tuple[tuple[str, ...], np.ndarray]:
        """How far the states of the two prompts are apart; NaN at distances beyond the prompt."""
        some = self.swaps(unit.checkpoint).select(unit.first, unit.last)
        at = some.needle[:, :1] + np.array(DISTANCES)
        inside = at < some.clean.shape[1]
        found = state_differences(
            model, some.clean, some.corrupt, np.minimum(at, some.clean.shape[1] - 1), batch=self._batch_of(unit, model)
        )
        return ("pair", "recurrent", "distance"), np.where(inside[:, None], found, np.nan)

    def _batch_of(self, unit: Unit, model: Any) -> int:
        """Pairs at a time: five streams and the heads of every layer are recorded of both prompts."""
        one = model.embed(torch.zeros(1, 1, dtype=torch.long, device=model.device))
        pair = 2 * self.lengths[unit.checkpoint] * len(model.layers) * 6 * one.numel() * one.element_size()
        return max(1, min(self._batch(unit.checkpoint, TOKENS_PER_BATCH), int(RECORDED_BYTES // pair)))

    def _knock_out(self, unit: Unit, model: Any) -> Dataset:
        some = self.swaps(unit.checkpoint).select(unit.first, unit.last)
        found = measure(model, some, self.sets(unit.checkpoint), self._batch_of(unit, model))
        return _dataset(**{name: (("set", "span", "pair"), found[name]) for name in MEASURED})

    def _baseline(self, unit: Unit, model: Any) -> Dataset:
        some = self.swaps(unit.checkpoint).select(unit.first, unit.last)
        clean, corrupt = logit_differences(model, some, batch_size=self._batch_of(unit, model))
        return _dataset(
            clean=(("pair",), clean), corrupt=(("pair",), corrupt), difference=self._difference(unit, model)
        )

    def _states(self, unit: Unit, model: Any) -> Dataset:
        name = unit.checkpoint
        prompts = self._prompts(name)[1]
        assert prompts is not None
        some, last = prompts.batch(unit.first, unit.last), self.lengths[name] - 1
        behind = np.minimum(some.needle[:, None] + np.array(self.distances(name)), last)
        positions = np.concatenate([behind, np.full((len(some.ids), 1), last)], 1)
        found = extract_states(
            model, some.ids, positions, width=self.config.width, seed=self.config.seed,
            batch=self._batch(name, STATE_TOKENS),
        )  # fmt: skip
        return _dataset(
            states=(("sample", "recurrent", "distance", "width"), found.states),
            streams=(("sample", "stream", "stream_width"), found.streams),
            stream_name=(("stream",), list(found.names)),
            label=(("sample",), some.label),
            needle=(("sample",), some.needle),
        )

    def _fit(self, unit: Fitting, load: Callable[[str], Dataset]) -> Dataset:
        weights = RANDOM_WEIGHTS if unit.control == RANDOM_WEIGHTS else TRAINED
        parts = [load(part.id) for part in self.units(unit.checkpoint, STATES, weights)]
        states, streams, label = (
            np.concatenate([part[key] for part in parts]) for key in ("states", "streams", "label")
        )
        distances = [*map(str, self.distances(unit.checkpoint)), "last"]
        features = {
            f"blocks.{layer} state, {distance}": np.ascontiguousarray(states[:, row, column])
            for row, layer in enumerate(state_layers(self.layers(unit.checkpoint)))
            for column, distance in enumerate(distances)
        }
        features |= {str(name): streams[:, i] for i, name in enumerate(parts[0]["stream_name"])}
        values = niah.VALUE_SETS[self.config.values]
        result = layerwise.fit(
            features, [values[index] for index in label], test_size=TEST_SIZE, seed=self.config.seed,
            shuffled=unit.control == SHUFFLED_LABELS, device=self.device, layers_at_once=8 if self.on_gpu else None,
        )  # fmt: skip
        found = to_dataset(result)
        needle = np.concatenate([part["needle"] for part in parts])[result.row]
        at = Variable(("sample",), needle, "token", "first token of the value inside the prompt")
        return Dataset({**found.variables, "needle": at}, found.coords)


def _dataset(**fields: tuple[tuple[str, ...], Any]) -> Dataset:
    return Dataset({name: Variable(dims, values, "1", name) for name, (dims, values) in fields.items()})
