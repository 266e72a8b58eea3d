"""Released checkpoints of other code bases as native models: one file per format, a table of tensor names each.

    HypeNet, MiniCPM-SALA, rethinking-hybrid-attention, flash-linear-attention (transformer, gated_deltanet, mamba2)

The numbers are those of the format's own code, none of which is run. What a native model cannot express is refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from models.config import ConfigError
from models.released_formats import fla, hypenet, llama, minicpm_sala
from models.released_formats.config_file import ConfigFile
from models.released_formats.conversion import Reading, check_tensors, native_tensors, released_tensors
from models.safetensors_files import CheckpointError

__all__ = ["Reading", "check_tensors", "is_released", "native_tensors", "read", "released_tensors"]

FORMATS: tuple[Any, ...] = (minicpm_sala, hypenet, fla, llama)
"""Modules with `recognises(values)` and `read(file, tensors)`; the first that recognises a config.json reads it."""


def is_released(values: dict[str, Any]) -> bool:
    """Whether a config.json is of one of these formats."""
    return any(module.recognises(values) for module in FORMATS)


def read(path: Path, values: dict[str, Any], tensors: Collection[str]) -> Reading:
    """What the config.json `values` of file `path` says; `tensors`: the names in the weight files.

    CheckpointError for a key that is not understood, missing or not expressible.
    """
    reader: Callable[..., Reading] = next(module.read for module in FORMATS if module.recognises(values))
    file = ConfigFile(path, values)
    try:
        reading = reader(file, tensors)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    file.close()
    return reading
