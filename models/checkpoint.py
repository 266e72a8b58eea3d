"""Native checkpoints: config.json, model.safetensors (or shards with an index), tokenizer.json, training.json."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models import released_formats
from models.config import FORMAT, FORMAT_VERSION, ConfigError, HybridConfig
from models.gguf_files import gguf_file
from models.hybrid_lm import HybridLM
from models.released_formats import is_released
from models.safetensors_files import SINGLE, CheckpointError, WeightFiles, read_json, scan
from models.tokenizer import Tokenizer

CONFIG, TOKENIZER, TRAINING = "config.json", "tokenizer.json", "training.json"


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """A model in eval mode from a native, a released (models.released_formats) or a Hugging Face directory, offline.

    device None: CUDA if there is one, else CPU. dtype None: fp32 on CPU, the stored dtype on CUDA. Every tensor must be
    there, with its shape, and none besides; else CheckpointError (a ValueError) is raised before a weight is read.
    trust_remote_code=True runs the Python files of a Hugging Face directory; one that needs them is refused without.
    """
    path = Path(path)
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    fields = {} if gguf_file(path) is not None else _config_fields(path)
    if fields.get("format") != FORMAT:
        if is_released(fields):
            return _load_released(path, fields, device, dtype, impl, trust_remote_code)
        from models.huggingface import load_huggingface

        return load_huggingface(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    config = _config(path, fields)
    with torch.device("meta"):
        model = HybridLM(config, impl=impl)
    weights = scan(path)
    _check_tensors(path, model, weights)
    tokenizer = _tokenizer(path, config)
    tensors = weights.tensors()
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    model = _materialise(model, config, tensors, impl)
    model.tokenizer = tokenizer
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def save(
    model: HybridLM, path: str | Path, training: dict[str, Any] | None = None, dtype: torch.dtype | None = None
) -> Path:
    """Writes a native checkpoint under a temporary name and renames it, so `path` is absent or complete.

    `training` goes to training.json (step, tokens, ...). Raises CheckpointError if `path` exists already.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path} exists already; remove it or choose another directory.")
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})
    (temporary / SINGLE).chmod(0o644)  # safetensors makes it readable by its owner only
    (temporary / CONFIG).write_text(json.dumps(model.config.to_json(), indent=1) + "\n")
    (temporary / TRAINING).write_text(json.dumps(training or {}, indent=1) + "\n")
    if model.tokenizer is not None:
        model.tokenizer.save(temporary / TOKENIZER)
    for file in temporary.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    temporary.rename(path)
    return path


def find_checkpoints(path: str | Path) -> list[Path]:
    """`path` itself if it is a checkpoint, else the checkpoints directly below it, in natural order of their names."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such directory; expected a checkpoint or a directory of checkpoints.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; expected a checkpoint directory (config.json, model.safetensors).")
    if _is_checkpoint(path):
        return [path]
    found = [child for child in path.iterdir() if not child.name.startswith(".") and _is_checkpoint(child)]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: neither it nor any directory below it has a {CONFIG}.")
    return sorted(found, key=_natural)


def _is_checkpoint(path: Path) -> bool:
    return (path / CONFIG).exists() or gguf_file(path) is not None


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _config_fields(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {kind}; expected a checkpoint directory (config.json, model.safetensors).")
    if not (path / CONFIG).exists():
        raise CheckpointError(f"{path} has no {CONFIG}, so it is no checkpoint directory.")
    return read_json(path / CONFIG)


def _config(path: Path, fields: dict[str, Any]) -> HybridConfig:
    if fields.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / CONFIG}: format_version is {fields.get('format_version')!r}; this build reads {FORMAT_VERSION}."
        )
    try:
        return HybridConfig.from_json(fields)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error


def _check_tensors(path: Path, model: HybridLM, weights: WeightFiles) -> None:
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights.shapes:
            raise CheckpointError(f"{path}: tensor {name!r} {list(shape)} is missing from its weight files.")
        if weights.shapes[name] != shape:
            found = list(weights.shapes[name])
            raise CheckpointError(
                f"{weights.files[name]}: tensor {name!r} has shape {found}; {CONFIG} asks for {list(shape)}."
            )
    if extra := sorted(set(weights.shapes) - set(expected)):
        raise CheckpointError(f"{weights.files[extra[0]]}: tensor {extra[0]!r} belongs to no layer of {CONFIG}.")


def _tokenizer(path: Path, config: HybridConfig) -> Tokenizer | None:
    if not (path / TOKENIZER).exists():
        return None
    tokenizer = Tokenizer.from_file(path / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path / TOKENIZER} has {tokenizer.vocab_size} tokens; the model of {CONFIG} has {config.vocab_size}."
        )
    return tokenizer


def _load_released(
    path: Path,
    fields: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
    impl: str | None,
    trust_remote_code: bool,
) -> HybridLM:
    """A released checkpoint as a native model, with the format's name as `source_format`.

    dtype None: fp32 on CPU, else the stored dtype of its embedding (some releases keep norms in fp32 beside bf16). On
    the meta device no weight is read.
    """
    weights = scan(path)
    reading = released_formats.read(path / CONFIG, fields, weights.shapes)
    with torch.device("meta"):
        model = HybridLM(reading.config, impl=impl)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    released_formats.check_tensors(reading, weights, shapes, str(path))
    embedding = next(rule.released[0] for rule in reading.rules if rule.native == "embed.weight")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else weights.dtype(embedding)
    if device.type != "meta":
        tensors = released_formats.native_tensors(reading, weights.tensors(), shapes)
        model = _materialise(model, reading.config, tensors, impl)
    model.source_format = reading.format
    from models.huggingface.tokenizer import load_tokenizer  # such releases come with transformers' files

    model.tokenizer = load_tokenizer(path, trust_remote_code, foreign=True)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _materialise(meta: HybridLM, config: HybridConfig, tensors: dict[str, torch.Tensor], impl: str | None) -> HybridLM:
    """The model with its tensors. Buffers that follow from the config (Lightning decays) are not stored: built anew."""
    meta.load_state_dict(tensors, strict=True, assign=True)
    if any(buffer.is_meta for buffer in meta.buffers()):
        model = HybridLM(config, impl=impl)
        model.load_state_dict(tensors, strict=True, assign=True)
        return model
    return meta
