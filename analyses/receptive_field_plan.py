"""The units of a receptive-field study, and how one is computed: checkpoint x condition x batch of samples."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
from analyses import evaluation, provenance
from analyses import receptive_field_measures as measures
from analyses.checkpoints import batches, is_native, named, torch_device, usable, working_dtype
from analyses.conditions import Condition, build
from analyses.receptive_field import CPU_DOCUMENTS, CPU_PROMPTS, GPU_PROMPTS, GRID_WINDOWS, Config
from analyses.result import Dataset, Variable
from kernels.operands import default_impl
from models.errors import InputError

DOCUMENT_BATCH = {"cpu": 8, "cuda": 32}
PROMPT_BATCH, EFFECT_DOCUMENTS = 64, 4
DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
GRID_SINKS, GRID_LAYER_WINDOWS = (0, 4), (16,)


@dataclass(frozen=True)
class Unit:
    """One piece of work. `part` is "documents", "prompts" or "effect"; rows are first .. last - 1 of its samples."""

    checkpoint: str
    part: str
    condition: Condition
    first: int = 0
    last: int = 0

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/{self.condition.label}/{self.part} {self.first}-{self.last}"


class Plan:
    """Everything a run has decided before a model computes: checkpoints, conditions, samples. Bad input ends here."""

    def __init__(self, config: Config, device: str):
        self.config = config
        self.device = torch_device(config.device or device)
        self.on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        if config.dtype not in DTYPES:
            raise InputError(f"--dtype is {config.dtype!r}; expected float32 or bfloat16")
        self.paths = named(config.paths)
        self.layers: dict[str, Any] = {}
        self.contexts: dict[str, int] = {}
        self.tokenizers: dict[str, Any] = {}
        self.dtypes: dict[str, str] = {}
        for name, path in self.paths.items():
            self._look_at(name, path)
        large = config.grid or self.on_gpu
        count = config.documents or (None if large else CPU_DOCUMENTS)
        self.documents = evaluation.documents(config.texts, config.key_tokens, count)
        for name in self.paths:
            self.contexts[name] = self._context(name)
        self.n_prompts = config.prompts or (GPU_PROMPTS if large else CPU_PROMPTS)
        self.large = large
        self.conditions = {name: self._conditions(name) for name in self.paths}
        self.prompts = {name: self._prompts(name) for name in self.paths}

    def _look_at(self, name: str, path: Path) -> None:
        """Refuses what cannot be studied; keeps shapes without weights, and one tokenizer where several are equal."""
        described = usable(path, self.config.impl, "documents and prompts")
        model = models.load(path, device="meta", impl=self.config.impl)
        if described.context is None:
            raise InputError(f"{path}: config.json names no context length (max_position_embeddings)")
        self.layers[name], self.contexts[name] = model.layers, described.context
        alike = {tokenizer.sha256: tokenizer for tokenizer in self.tokenizers.values()}
        own = described.tokenizer
        self.tokenizers[name] = alike.get(own.sha256, own)  # steps of a run share what follows
        self.dtypes[name] = working_dtype(described, self.config.dtype, self.on_gpu)
        self.impl = self.config.impl or default_impl(self.device, getattr(torch, self.dtypes[name]))

    def _context(self, name: str) -> int:
        """Tokens to study: --context, else a native model's training length; of a Hugging Face model, which may take
        far longer texts than there are, no more than the longest document."""
        trained = self.contexts[name]
        if self.config.context is not None or is_native(self.paths[name]):
            return self.config.context or trained
        return min(trained, max(len(document.ids) for document in self.encoded(name)))

    def _conditions(self, name: str) -> list[Condition]:
        config, context = self.config, self.contexts[name]
        default = max(1, context // 8)
        grid_windows = tuple(w for w in GRID_WINDOWS if w < context) or (default,)
        windows = config.windows or (grid_windows if config.grid else (default,))
        sinks = config.sinks or (GRID_SINKS if config.grid else (0,))
        layer_windows = tuple(dict.fromkeys((default, *GRID_LAYER_WINDOWS))) if config.grid else ()
        reaches = config.reach or ((default,) if config.grid else ())
        found = build(windows, sinks, layer_windows, len(self.layers[name]), reaches, floors=config.grid)
        if config.sinks and any(config.sinks):
            for condition in found:
                if condition.sinks and (reason := condition.not_applicable(self.layers[name])):
                    if reason.startswith("no "):
                        continue
                    raise InputError(f"{self.paths[name]}: {condition.label}: {reason}; use --sinks 0")
        return found

    def _prompts(self, name: str) -> Any:
        context = self.contexts[name]
        length = self.config.prompt_length or (context if self.large else context // 4)
        settings = {"length": length, "n": self.n_prompts, "seed": self.config.seed, "haystack": self.config.haystack}
        return self._build_prompts(self.tokenizers[name], tuple(settings.items()))

    @functools.cache  # noqa: B019 (one plan a process)
    def _build_prompts(self, tokenizer: Any, settings: tuple[tuple[str, Any], ...]) -> Any:
        return evaluation.prompts(tokenizer, dict(settings))

    @property
    def dtype(self) -> str:
        """Of the computation; several only where checkpoints on a GPU are stored in several."""
        return ", ".join(dict.fromkeys(self.dtypes.values()))

    def identity(self) -> dict[str, Any]:
        """What decides the data: settings as resolved, content of checkpoints and texts; not where files lie."""
        return provenance.configuration(
            self.config,
            exclude=("out", "overwrite", "paths", "device", "texts", "key_tokens"),
            checkpoints={name: provenance.checkpoint_sha256(path) for name, path in self.paths.items()},
            document_names=[document.name for document in self.documents],
            document_sha256=[document.sha256 for document in self.documents],
            evaluators=sorted({document.key_tokens.evaluator for document in self.documents}),
            n_prompts=self.n_prompts,
            prompt_lengths={name: prompts.settings.length for name, prompts in self.prompts.items()},
            resolved_dtype=self.dtype,
            resolved_impl=self.impl,
            device_type=self.device.type,
        )

    def measured(self, name: str) -> list[Condition]:
        """The conditions that are run; one that changes nothing is copied from "none" instead."""
        layers = self.layers[name]
        return [c for c in self.conditions[name] if not c.not_applicable(layers) and not c.changes_nothing(layers)]

    def effect_windows(self, name: str) -> list[int]:
        return sorted(
            {c.window for c in self.conditions[name] if c.group in ("full", "efficient", "layer") and c.window}
        )

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """By id, in an order that loads each checkpoint once."""
        found = []
        for name in self.paths:
            for condition in self.measured(name):
                found += [
                    Unit(name, "documents", condition, *rows)
                    for rows in batches(len(self.documents), DOCUMENT_BATCH[self.device.type])
                ]
                found += [Unit(name, "prompts", condition, *rows) for rows in batches(self.n_prompts, PROMPT_BATCH)]
            effect_documents = min(len(self.documents), EFFECT_DOCUMENTS) if self.config.grid else 1
            for window in self.effect_windows(name):
                found.append(Unit(name, "effect", Condition("full", window=window), 0, effect_documents))
        return {unit.id: unit for unit in found}

    @functools.cached_property
    def unit_ids(self) -> dict[tuple[str, str, Condition], list[str]]:
        """The units of (checkpoint, part, condition), in order of their samples."""
        found: dict[tuple[str, str, Condition], list[str]] = {}
        for unit in self.units.values():
            found.setdefault((unit.checkpoint, unit.part, unit.condition), []).append(unit.id)
        return found

    def compute(self, unit: Unit) -> Dataset:
        model = self.model(unit.checkpoint)
        if unit.part == "documents":
            return self._document_unit(model, unit)
        if unit.part == "prompts":
            samples = self.samples(unit.checkpoint)[unit.first : unit.last]
            scores = measures.prompt_accuracy(model, unit.condition, samples)
            return Dataset({
                "correct": Variable(("prompt",), np.array([float(s[0]) for s in scores]), "1", "all digits right"),
                "digits": Variable(("prompt",), np.array([s[1] for s in scores]), "1", "share of digits right"),
            })  # fmt: skip
        return self._effect_unit(model, unit)

    def _document_unit(self, model: Any, unit: Unit) -> Dataset:
        documents = self.encoded(unit.checkpoint)[unit.first : unit.last]
        rows = measures.document_losses(model, unit.condition, documents, self.contexts[unit.checkpoint])
        variables = {
            name: Variable(("document",), np.array([row[name] for row in rows]), "nat", name)
            for name in ("key_loss", "matched_loss", "loss")
        }
        buckets = np.array([row["bucket_loss"] for row in rows])
        return Dataset({**variables, "bucket_loss": Variable(("document", "bucket"), buckets, "nat", "bucket_loss")})

    def _effect_unit(self, model: Any, unit: Unit) -> Dataset:
        layers = self.layers[unit.checkpoint]
        groups = [g for g in ("full", "efficient") if not Condition(g, window=1).not_applicable(layers)]
        effect = np.full((2, len(layers), unit.last), np.nan)
        for row, document in enumerate(self.encoded(unit.checkpoint)[: unit.last]):
            found = measures.layer_effects(model, groups, unit.condition.window, document)
            for group, values in found.items():
                for layer, value in values.items():
                    effect[("full", "efficient").index(group), layer, row] = value
        return Dataset({"effect": Variable(("group", "layer", "document"), effect, "1", "effect")})

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one plan a process)
    def model(self, name: str) -> Any:
        return models.load(self.paths[name], device=self.device, dtype=DTYPES[self.config.dtype], impl=self.config.impl)

    def encoded(self, name: str) -> list[evaluation.Encoded]:
        """The documents in a checkpoint's tokens."""
        return self._encode(self.tokenizers[name])

    def samples(self, name: str) -> list[Any]:
        """The needle prompts in a checkpoint's tokens."""
        return self._build_samples(self.prompts[name])

    @functools.cache  # noqa: B019 (one plan a process)
    def _encode(self, tokenizer: Any) -> list[evaluation.Encoded]:
        return [evaluation.encode(document, tokenizer) for document in self.documents]

    @functools.cache  # noqa: B019 (one plan a process)
    def _build_samples(self, prompts: Any) -> list[Any]:
        return list(prompts)
