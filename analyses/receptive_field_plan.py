"""The units of a receptive-field study, and how one is computed: checkpoint x condition x batch of samples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
from analyses import background, evaluation, mean_ablation, provenance
from analyses import receptive_field_measures as measures
from analyses.checkpoints import is_native, kernel_impl, named, torch_device, usable, working_dtype
from analyses.conditions import Condition, build
from analyses.layer_subsets import parse, subset_conditions
from analyses.receptive_field import CPU_DOCUMENTS, CPU_PROMPTS, GPU_PROMPTS, GRID_WINDOWS, Config
from analyses.receptive_field_units import Unit, units_of
from analyses.result import Dataset, Variable
from models.errors import InputError

DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
GRID_SINKS, GRID_LAYER_WINDOWS = (0, 4), (16,)


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
        self.trained: dict[str, int] = {}  # beyond it is extrapolation
        self.contexts: dict[str, int] = {}
        self.tokenizers: dict[str, Any] = {}
        self.dtypes: dict[str, str] = {}
        for name, path in self.paths.items():
            self._look_at(name, path)
        large = config.grid or self.on_gpu
        count = config.documents or (None if large else CPU_DOCUMENTS)
        self.documents = evaluation.documents(config.texts, config.key_tokens, count, config.domain)
        texts = {document.name: document.text for document in self.documents}
        self.texts = background.background_texts(config.texts, config.domain, texts)
        self.ablate = config.ablate or config.grid
        self.calibration = mean_ablation.calibration(config.calibration, list(texts.values())) if self.ablate else None
        self.lengths = tuple(sorted({1, *config.lengths}))
        for name in self.paths:
            self.contexts[name] = self._context(name)
        self.n_prompts = config.prompts or (GPU_PROMPTS if large else CPU_PROMPTS)
        self.large = large
        self.conditions = {name: self._conditions(name) for name in self.paths}
        self.prompts = {name: self._prompts(name) for name in self.paths}
        for name in self.paths if len(self.lengths) > 1 else ():
            self.encoded(name, self.lengths[-1])  # too few texts for the longest are found before a model runs

    def _look_at(self, name: str, path: Path) -> None:
        """Refuses what cannot be studied; keeps shapes without weights, and one tokenizer where several are equal."""
        described = usable(path, self.config.impl, "documents and prompts", self.config.trust_remote_code)
        if described.context is None:
            raise InputError(f"{path}: config.json names no context length (max_position_embeddings)")
        self.layers[name], self.contexts[name] = described.layers, described.context
        self.trained[name] = self.config.context or described.context
        alike = {tokenizer.sha256: tokenizer for tokenizer in self.tokenizers.values()}
        own = described.tokenizer
        self.tokenizers[name] = alike.get(own.sha256, own)  # steps of a run share what follows
        self.dtypes[name] = working_dtype(described, self.config.dtype, self.on_gpu)
        self.impl = kernel_impl(described, self.config.impl, self.device, self.dtypes[name])

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
        floors, count = config.grid or config.floor, len(self.layers[name])
        found = build(windows, sinks, layer_windows, count, reaches, floors, self.ablate)
        found += subset_conditions(parse(config.layers, count), windows, sinks)
        found = list(dict.fromkeys(found))
        if config.sinks and any(config.sinks):
            for condition in found:
                if condition.sinks and (reason := condition.not_applicable(self.layers[name])):
                    if reason.startswith("no "):
                        continue
                    raise InputError(f"{self.paths[name]}: {condition.label}: {reason}; use --sinks 0")
        return found

    def _prompts(self, name: str, stretch: int = 1) -> Any:
        context = self.contexts[name]
        length = self.config.prompt_length or (context if self.large or len(self.lengths) > 1 else context // 4)
        settings = {
            "length": length * stretch,
            "n": self.n_prompts,
            "seed": self.config.seed,
            "haystack": self.config.haystack,
        }
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
            exclude=(*provenance.RUN_FIELDS, "paths", "device", "texts", "key_tokens", "calibration"),
            checkpoints={name: provenance.checkpoint_sha256(path) for name, path in self.paths.items()},
            document_names=[document.name for document in self.documents],
            document_sha256=[document.sha256 for document in self.documents],
            background_sha256=background.sha256(self.texts),
            calibration_sha256=self.calibration.sha256 if self.calibration else None,
            evaluators=sorted({document.key_tokens.evaluator for document in self.documents}),
            n_prompts=self.n_prompts,
            prompt_lengths={name: prompts.settings.length for name, prompts in self.prompts.items()},
            resolved_dtype=self.dtype,
            resolved_impl=self.impl,
            device_type=self.device.type,
            **provenance.trusted_code(self.config.trust_remote_code, self.paths),
        )

    def attributes(self) -> dict[str, Any]:
        return provenance.run_attributes(
            checkpoints=self.paths,
            layer_kinds={name: [layer.kind for layer in self.layers[name]] for name in self.paths},
            kernel_impl=self.impl,
            dtype=self.dtype,
            device=self.device_name,
            seed=self.config.seed,
        )

    def measured(self, name: str) -> list[Condition]:
        """The conditions that are run; one that changes nothing is copied from "none" instead."""
        layers = self.layers[name]
        return [c for c in self.conditions[name] if not c.not_applicable(layers) and not c.changes_nothing(layers)]

    def effect_windows(self, name: str) -> list[int]:
        return sorted({c.window for c in self.conditions[name] if c.group not in ("none", "floor") and c.window})

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """By id, in an order that loads each checkpoint once."""
        return {unit.id: unit for name in self.paths for unit in units_of(self, name)}

    @functools.cached_property
    def unit_ids(self) -> dict[tuple[str, str, Condition], list[str]]:
        """The units of (checkpoint, part, condition) at the training length, in order of their samples."""
        return {key[:3]: ids for key, ids in self.unit_ids_by_length.items() if key[3] == 1}

    @functools.cached_property
    def unit_ids_by_length(self) -> dict[tuple[str, str, Condition, int], list[str]]:
        """The units of (checkpoint, part, condition, stretch), in order of their samples."""
        found: dict[tuple[str, str, Condition, int], list[str]] = {}
        for unit in self.units.values():
            found.setdefault((unit.checkpoint, unit.part, unit.condition, unit.stretch), []).append(unit.id)
        return found

    def compute(self, unit: Unit) -> Dataset:
        model = self.model(unit.checkpoint)
        means = self._means(unit.checkpoint, unit.condition) if unit.condition.ablated else None
        if unit.part == "documents":
            return self._document_unit(model, unit, means)
        if unit.part == "prompts":
            samples = self.samples(unit.checkpoint, unit.stretch)[unit.first : unit.last]
            scores = measures.prompt_accuracy(model, unit.condition, samples, means)
            return Dataset({
                "correct": Variable(("prompt",), np.array([float(s[0]) for s in scores]), "1", "all digits right"),
                "digits": Variable(("prompt",), np.array([s[1] for s in scores]), "1", "share of digits right"),
            })  # fmt: skip
        return self._effect_unit(model, unit)

    def _document_unit(self, model: Any, unit: Unit, means: Any) -> Dataset:
        documents = self.encoded(unit.checkpoint, unit.stretch)[unit.first : unit.last]
        rows = measures.document_losses(model, unit.condition, documents, self.contexts[unit.checkpoint], means)
        second = {"bucket_loss": "bucket", "repeat_loss": "gap", "repeat_first_loss": "gap"}
        variables = {}
        for name in rows[0]:
            dims = ("document", second[name]) if name in second else ("document",)
            variables[name] = Variable(dims, np.array([row[name] for row in rows]), "nat", name)
        return Dataset(variables)

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
        dtype, trusted = DTYPES[self.config.dtype], self.config.trust_remote_code
        return models.load(self.paths[name], self.device, dtype, self.config.impl, trust_remote_code=trusted)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one plan a process)
    def _means(self, name: str, condition: Condition) -> Any:
        assert self.calibration is not None, "a condition with means needs calibration texts"
        return mean_ablation.means(self.model(name), self.calibration_tokens(name), condition.layers)

    def calibration_tokens(self, name: str) -> list[np.ndarray]:
        """The tokens over which a checkpoint's means are taken, [1, T] each; empty without --ablate."""
        if self.calibration is None:
            return []
        return mean_ablation.batches(self.calibration, self.tokenizers[name], self.contexts[name])

    def encoded(self, name: str, stretch: int = 1) -> list[evaluation.Encoded]:
        """The documents in a checkpoint's tokens; at m times its training length behind m - 1 times that many tokens
        of other texts."""
        return self._encode(self.tokenizers[name], self.contexts[name] * (stretch - 1))

    def matching(self, name: str) -> evaluation.Matching:
        """How alike key tokens and their partners are, in a checkpoint's tokens."""
        tokenizer = self.tokenizers[name]
        return evaluation.matching(self.documents, self.encoded(name), tokenizer, self._background(tokenizer))

    def samples(self, name: str, stretch: int = 1) -> list[Any]:
        """The needle prompts in a checkpoint's tokens."""
        return self._build_samples(self.prompts[name] if stretch == 1 else self._prompts(name, stretch))

    @functools.cache  # noqa: B019 (one plan a process)
    def _background(self, tokenizer: Any) -> background.Background:
        return background.in_tokens(self.texts, tokenizer, evaluation.NGRAM)

    @functools.cache  # noqa: B019 (one plan a process)
    def _encode(self, tokenizer: Any, before: int) -> list[evaluation.Encoded]:
        around = self._background(tokenizer)
        if before == 0:
            return [evaluation.encode(document, tokenizer, around) for document in self.documents]
        bos = tokenizer.bos_id is not None
        return [one.behind(around.before(one.name, before), bos) for one in self._encode(tokenizer, 0)]

    @functools.cache  # noqa: B019 (one plan a process)
    def _build_samples(self, prompts: Any) -> list[Any]:
        return list(prompts)
