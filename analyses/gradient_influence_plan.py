"""The units of a gradient-influence study, and how one is computed: checkpoint x part x batch of texts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import models
from analyses import gradient_influence_measures as measures
from analyses import provenance, texts
from analyses.checkpoints import DTYPES, Checkpoint, batches, kernel_impl, named, torch_device, usable, working_dtype
from analyses.gradient_influence import CPU_LENGTH, CPU_TEXTS, MINIATURE_WINDOWS, N_TARGETS, PAPER_WINDOWS, Config
from analyses.influence_curve import bin_means, log_bins
from analyses.result import Dataset, Variable
from models.errors import InputError
from probes.gradient import Score

UNIT_TEXTS = {"cpu": 2, "cuda": 8}
DIMS = {"norm": ("text", "d"), "error": ("text", "d"), "score": ("text",), "bos": ("text",)}
DIMS["layers"] = ("text", "layer", "bin")
RESOLVED = ("paths", "texts", "preset", "length", "max_texts", "windows", "device", "dtype", "impl", "keep_gb")
INFLUENCE, TRUNCATION, FLOAT32 = "influence", "truncation", "float32"


@dataclass(frozen=True)
class Unit:
    """One piece of work. `part` is influence, truncation, full, efficient or float32; texts first .. last - 1."""

    checkpoint: str
    part: str
    first: int
    last: int

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.part} {self.first}-{self.last}"


class Plan:
    """Everything a run has decided before a model computes: checkpoints, lengths, texts. Bad input ends here."""

    def __init__(self, config: Config, device: str):
        self.config = config
        self.device = torch_device(config.device or device)
        self.on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        if config.dtype not in DTYPES:
            raise InputError(f"--dtype is {config.dtype!r}; expected float32, bfloat16 or float16")
        self.score: Score = config.resolved("score") or "log_prob"
        self.n_targets = config.resolved("n_targets") or N_TARGETS
        found, trusted = named(config.paths), config.trust_remote_code
        self.checkpoints = {name: usable(path, config.impl, "texts", trusted) for name, path in found.items()}
        self.dtypes = {name: working_dtype(c, config.dtype, self.on_gpu) for name, c in self.checkpoints.items()}
        self.lengths = {name: self._length(checkpoint) for name, checkpoint in self.checkpoints.items()}
        read = texts.read_texts(config.texts)
        count = config.resolved("max_texts") or (None if self.on_gpu else CPU_TEXTS)
        self.cuts = self._cut(read, count)
        self.marked = {name: self._marked(name) for name in self.checkpoints}
        self._loaded: tuple[tuple[str, str], Any] | None = None

    def _length(self, checkpoint: Checkpoint) -> int:
        length = self.config.resolved("length")
        if length is None:
            context = checkpoint.context
            if context is None:
                raise InputError(f"{checkpoint.path}: its config.json names no context length; choose with --length")
            length = context if self.on_gpu else min(context, CPU_LENGTH)
        if length < self.n_targets + 2:  # BOS or a first token, and the one that is only predicted
            least = self.n_targets + 2
            raise InputError(f"{length} tokens for {self.n_targets} targets; expected --length {least} or more")
        return int(length)

    def _cut(self, read: list[texts.Text], count: int | None) -> dict[str, texts.Cut]:
        """The tokens of every checkpoint; those of one tokenizer and length (steps of a run) are made once."""
        made: dict[tuple[str, int], texts.Cut] = {}
        cuts = {}
        for name, checkpoint in self.checkpoints.items():
            key = (checkpoint.tokenizer.sha256, self.lengths[name])
            if key not in made:
                try:
                    made[key] = texts.first_tokens(read, checkpoint.tokenizer, self.lengths[name], count)
                except InputError as error:
                    raise InputError(f"{checkpoint.path}: {error}") from error
            cuts[name] = made[key]
        return cuts

    def n_distances(self, name: str) -> int:
        """Distances of a curve: the positions read, without a BOS."""
        return self.lengths[name] - int(self.score == "log_prob") - int(self.cuts[name].bos)

    def _marked(self, name: str) -> list[int]:
        length, limit = self.lengths[name], self.n_distances(name)
        default = PAPER_WINDOWS if length >= 8192 else (*MINIATURE_WINDOWS, length // 8)
        if self.config.windows and max(self.config.windows) >= limit:
            raise InputError(f"--windows has {max(self.config.windows)}; curves have {limit} distances: expected fewer")
        return sorted({w for w in self.config.windows or default if 1 <= w < limit})

    def windows(self, name: str) -> list[int]:
        """Marked windows, and all powers of two that hold the targets."""
        limit = self.n_distances(name)
        powers = [2**k for k in range(limit.bit_length()) if self.n_targets <= 2**k < limit]
        return sorted({*self.marked[name], *powers})

    @property
    def dtype(self) -> str:
        return ", ".join(dict.fromkeys(self.dtypes.values()))

    def impl(self, name: str) -> str:
        return kernel_impl(self.checkpoints[name], self.config.impl, self.device, self.dtypes[name])

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings as resolved, content of checkpoints and texts; not where files lie."""
        return provenance.configuration(
            self.config,
            exclude=(*provenance.RUN_FIELDS, *RESOLVED),
            score=self.score,
            n_targets=self.n_targets,
            lengths=self.lengths,
            marked_windows=self.marked,
            checkpoints={name: provenance.checkpoint_sha256(c.path) for name, c in self.checkpoints.items()},
            text_names={name: cut.names for name, cut in self.cuts.items()},
            token_sha256={name: cut.sha256 for name, cut in self.cuts.items()},
            texts_too_short={name: cut.too_short for name, cut in self.cuts.items()},
            resolved_dtype=self.dtype,
            resolved_impl={name: self.impl(name) for name in self.checkpoints},
            device_type=self.device.type,
            **provenance.trusted_code(self.config.trust_remote_code, {n: c.path for n, c in self.checkpoints.items()}),
        )

    def attributes(self) -> dict[str, Any]:
        return provenance.run_attributes(
            checkpoints={name: checkpoint.path for name, checkpoint in self.checkpoints.items()},
            layer_kinds={name: self.kinds(name) for name in self.checkpoints},
            kernel_impl=", ".join(dict.fromkeys(map(self.impl, self.checkpoints))),
            dtype=self.dtype,
            device=self.device_name,
            seed=self.config.seed,
        )

    def kinds(self, name: str) -> list[str]:
        return [layer.kind for layer in self.checkpoints[name].layers or ()]

    def not_applicable(self, name: str, group: str) -> str:
        """Why influence through a group means nothing for this checkpoint; empty if it applies."""
        full = {path.kind == "full" for layer in self.checkpoints[name].layers or () for path in layer.paths}
        return "" if (group == "full") in full else f"n/a: no {group} path"

    def noise_texts(self, name: str) -> int:
        """Texts that are computed in float32 too."""
        return 0 if self.dtypes[name] == "float32" else min(self.config.noise_texts, len(self.cuts[name].names))

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """By id, in an order that loads each checkpoint once, and once more for float32."""
        found = []
        for name, cut in self.cuts.items():
            parts = [(INFLUENCE, len(cut.names)), (TRUNCATION, len(cut.names))]
            if self.config.groups:
                parts += [(g, len(cut.names)) for g in measures.GROUPS if not self.not_applicable(name, g)]
            for part, count in (*parts, (FLOAT32, self.noise_texts(name))):
                found += [Unit(name, part, *rows) for rows in batches(count, UNIT_TEXTS[self.device.type])]
        return {unit.id: unit for unit in found}

    def parts(self, name: str, part: str) -> list[str]:
        """Ids of the units of one part, in order of their texts."""
        return [unit.id for unit in self.units.values() if (unit.checkpoint, unit.part) == (name, part)]

    def compute(self, unit: Unit) -> Dataset:
        if unit.part == FLOAT32:
            return self._noise(unit)
        if unit.part == TRUNCATION:
            return self._truncation(unit)
        first = unit.part == INFLUENCE
        through = unit.part if unit.part in measures.GROUPS else None
        layers = first and self.config.layers
        found = self._influence(unit, self.dtypes[unit.checkpoint], through=through, layers=layers)
        kept = self.n_distances(unit.checkpoint)
        found["bos"] = found["norm"][:, kept:].sum(1)  # at most one column
        found["norm"] = found["norm"][:, :kept]
        if layers:
            found["layers"] = bin_means(found["layers"][..., :kept], log_bins(kept)).astype(np.float32)
        if through:
            found["norm"] = bin_means(found["norm"], log_bins(kept)).astype(np.float32)
        return Dataset(_variables(found))

    def _influence(self, unit: Unit, dtype: str, **options: Any) -> dict[str, np.ndarray]:
        model, cut = self.model(unit.checkpoint, dtype), self.cuts[unit.checkpoint]
        ids, names = cut.ids[unit.first : unit.last], cut.names[unit.first : unit.last]
        return measures.influence(
            model, ids, names, score=self.score, n_targets=self.n_targets, keep_gb=self.config.keep_gb, **options
        )

    def _noise(self, unit: Unit) -> Dataset:
        """The curve in float32, and the norm of what the gradient in the model's dtype differs from it by."""
        exact, rough = (self._influence(unit, dtype, vectors=True) for dtype in (FLOAT32, self.dtypes[unit.checkpoint]))
        error = np.linalg.norm(rough["gradient"] - exact["gradient"], axis=-1)
        kept = self.n_distances(unit.checkpoint)
        return Dataset(_variables({"norm": exact["norm"][:, :kept], "error": error[:, :kept]}))

    def _truncation(self, unit: Unit) -> Dataset:
        """Losses given all and given each window. With log_prob the former is minus the score of the influence units:
        a forward less."""
        model, cut = self.model(unit.checkpoint, self.dtypes[unit.checkpoint]), self.cuts[unit.checkpoint]
        ids, names = cut.ids[unit.first : unit.last], cut.names[unit.first : unit.last]
        windows = [*([] if self.score == "log_prob" else [None]), *self.windows(unit.checkpoint)]
        losses = [self._losses(model, ids, names, window, cut.bos) for window in windows]
        return Dataset({"loss": Variable(("text", "given"), np.stack(losses, axis=1), "nat", "all, then windows")})

    def _losses(self, model: Any, ids: np.ndarray, names: list[str], window: int | None, bos: bool) -> np.ndarray:
        if window is not None and window < self.n_targets:
            return np.full(len(ids), np.nan)
        return measures.losses_of_last(model, ids, names, self.n_targets, window, bos)

    def model(self, name: str, dtype: str) -> Any:
        """One model at a time: the one before is dropped first, as two of them may not fit."""
        if self._loaded is None or self._loaded[0] != (name, dtype):
            self._loaded = None
            path = self.checkpoints[name].path
            impl, trusted = self.config.impl, self.config.trust_remote_code
            found = models.load(path, self.device, DTYPES[dtype], impl, trust_remote_code=trusted)
            self._loaded = ((name, dtype), found)
        return self._loaded[1]


def _variables(found: dict[str, np.ndarray]) -> dict[str, Variable]:
    return {key: Variable(DIMS[key], values, "1", key) for key, values in found.items()}
