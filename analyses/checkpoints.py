"""The checkpoints of a run and its device: named, described without reading weights, refused in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import models
from kernels.operands import default_impl
from models.config import FORMAT
from models.errors import InputError
from models.gguf_files import gguf_file
from models.released_formats import is_released
from models.safetensors_files import read_json, scan

DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Checkpoint:
    """What a directory says of itself, without its weights."""

    path: Path
    native: bool
    """Whether it loads as a models.HybridLM."""
    context: int | None
    tokenizer: Any
    stored_dtype: str | None
    layers: tuple[Any, ...] | None
    """Of the model on the meta device: kinds, windows and heads; the mixers cannot run."""


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """{name: checkpoint}: the directory's name, with its parents' where two would be alike. InputError for none."""
    if not paths:
        raise InputError("no checkpoint given; name a checkpoint directory or a directory of them")
    places: dict[Path, Path] = {}  # where it lies: how it was given, which is what the result records
    for path in paths:
        for checkpoint in models.find_checkpoints(path):
            places.setdefault(checkpoint.resolve(), checkpoint)
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    return {"_".join(place.parts[-depth:]).strip("/"): given for place, given in places.items()}


def is_native(path: Path) -> bool:
    """Whether the directory was written by models.save; else it is taken for a Hugging Face one."""
    return gguf_file(path) is None and read_json(path / "config.json").get("format") == FORMAT


def is_hybrid_lm(path: Path) -> bool:
    """Whether models.load makes a native model of it: is_native, or a release that becomes one."""
    if gguf_file(path) is not None:
        return False
    fields = read_json(path / "config.json")
    return fields.get("format") == FORMAT or is_released(fields)


def describe(path: Path, trust_remote_code: bool = False) -> Checkpoint:
    """Configuration, tokenizer and headers of what models.load takes; CheckpointError for a damaged directory."""
    if is_hybrid_lm(path):
        model = models.load(path, device="meta", trust_remote_code=trust_remote_code)
        dtype = str(model.dtype).removeprefix("torch.")
        return Checkpoint(path, True, model.config.context_length, model.tokenizer, dtype, model.layers)
    if gguf_file(path) is not None:  # quantised weights, which load as float32 or as asked
        model = models.load(path, device="meta")
        return Checkpoint(
            path,
            False,
            getattr(model.config, "max_position_embeddings", None),
            model.tokenizer,
            "float32",
            model.layers,
        )
    fields = read_json(path / "config.json")
    text = fields.get("text_config") or fields  # of a model with several parts
    scan(path)
    found = [part.get(key) for part in (fields, text) for key in ("dtype", "torch_dtype")]
    stored = next((str(value).removeprefix("torch.") for value in found if value), None)
    model = models.load(path, device="meta", trust_remote_code=trust_remote_code)
    return Checkpoint(path, False, text.get("max_position_embeddings"), model.tokenizer, stored, model.layers)


def usable(path: Path, impl: str | None, needed_by: str, trust_remote_code: bool = False) -> Checkpoint:
    """The description of a checkpoint with a tokenizer, which `needed_by` need; InputError for one that has none, for
    an unknown --impl, and for any --impl of a Hugging Face directory."""
    found = describe(path, trust_remote_code)
    if found.tokenizer is None:
        raise InputError(f"{path} has no tokenizer.json; {needed_by} need one")
    if impl is not None and not found.native:
        raise InputError(f"--impl is {impl!r}, but {path} is no native checkpoint; leave it out")
    if impl is not None:
        models.load(path, device="meta", impl=impl)  # refuses an unknown one
    return found


def working_dtype(checkpoint: Checkpoint, asked: str | None, on_gpu: bool) -> str:
    """The dtype asked for, else float32 on a CPU and the stored one on a GPU; InputError if that has no name here."""
    name = asked or (checkpoint.stored_dtype if on_gpu else "float32")
    if name is None or name not in DTYPES:
        raise InputError(f"{checkpoint.path}: its config.json names dtype {name!r}; choose one with --dtype")
    return name


def kernel_impl(checkpoint: Checkpoint, asked: str | None, device: torch.device, dtype: str) -> str:
    """Who computes the kernels, as results say it: of a Hugging Face model, its softmax layers and exact windows."""
    used = asked or default_impl(device, getattr(torch, dtype))
    if checkpoint.native or used == "torch" or dtype == "float32":
        return used
    return f"{used} (torch where attention hides nothing)"  # models.huggingface.attention.has_fused_form


def torch_device(name: str) -> torch.device:
    """The device of that name; InputError unless it is the CPU or a visible GPU."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device is {name!r}; expected cpu, cuda or cuda:N") from error
    if device.type not in DEVICES:
        raise InputError(f"--device is {name!r}; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device is {name!r}, but {torch.cuda.device_count()} GPUs are visible; use another or cpu")
    return device


def batches(count: int, size: int) -> list[tuple[int, int]]:
    """[(first, last + 1), ...]: `count` samples cut into pieces of `size`."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]
