"""Reading the weight files of a checkpoint directory strictly: every fault is one error naming file and tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(InputError):
    """A checkpoint directory that cannot be loaded as it is."""


@dataclass(frozen=True)
class WeightFiles:
    """Which file holds each tensor, with its shape; nothing is read but headers."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, one file opened once."""
        loaded: dict[str, Tensor] = {}
        for path in sorted(set(self.files.values())):
            with safe_open(path, framework="pt") as handle:
                loaded.update({name: handle.get_tensor(name) for name, file in self.files.items() if file == path})
        return loaded

    def dtype(self, name: str) -> torch.dtype:
        """Of one stored tensor."""
        with safe_open(self.files[name], framework="pt") as handle:
            return handle.get_slice(name)[:0].dtype


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file if it is missing, no JSON or no JSON object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({_likely_cause(path) or error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; expected an object.")
    return content


def scan(directory: Path) -> WeightFiles:
    """Headers of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    index = directory / INDEX
    if not index.exists():
        single = directory / SINGLE
        if not single.exists():
            raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; other weight formats are not read.")
        shapes = _header(single)
        return WeightFiles({name: single for name in shapes}, shapes)
    if (directory / SINGLE).exists():
        raise CheckpointError(f"{directory} has both {SINGLE} and {INDEX}; remove the stale one.")
    return _scan_shards(directory, index)


def _scan_shards(directory: Path, index: Path) -> WeightFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to shards.")
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / str(shard)
        if not path.exists():
            raise CheckpointError(f"{path}: this shard is missing, but {INDEX} lists it; copy it again.")
        header = _header(path)
        listed = {name for name, file in weight_map.items() if file == shard}
        if absent := sorted(listed - set(header)):
            raise CheckpointError(f"{path} lacks tensor {absent[0]!r} that {INDEX} places there; the index is stale.")
        if unlisted := sorted(set(header) - listed):
            raise CheckpointError(f"{path} holds {unlisted[0]!r}, which {INDEX} does not list; the index is stale.")
        shapes.update(header)
    return WeightFiles({name: directory / str(file) for name, file in weight_map.items()}, shapes)


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        cause = _likely_cause(path) or "truncated or damaged; copy it again"
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a readable safetensors file: {cause} ({error})."
        ) from error


def _likely_cause(path: Path) -> str | None:
    """What a file that should be weights or JSON most often is instead; read from its first bytes."""
    start = path.open("rb").read(256).lstrip().lower()
    if not start:
        return "the file is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; run 'git lfs pull'"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is an HTML page, so the download went wrong"
    return None
