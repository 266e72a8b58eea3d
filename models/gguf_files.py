"""Directories that hold one GGUF file instead of config.json and safetensors, read by transformers' own loader.

Weights are dequantised when they are loaded. transformers needs the package gguf for it: pip install gguf accelerate.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from models.safetensors_files import CheckpointError

MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")


def gguf_file(path: Path) -> Path | None:
    """The directory's GGUF file; None if it has a config.json or no such file. CheckpointError for several."""
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{path} holds {len(found)} GGUF files ({found[0].name}, {found[1].name}); expected one.")
    return found[0] if found else None


def gguf_source(path: Path) -> dict[str, str]:
    """The arguments that make transformers read the directory's GGUF file; {} for any other directory.

    CheckpointError naming the file if it is none, and if a package that is needed for it is missing.
    """
    file = gguf_file(path)
    if file is None:
        return {}
    with file.open("rb") as handle:
        if handle.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{file} ({file.stat().st_size} bytes) is no GGUF file; copy it again.")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(f"{file}: reading GGUF needs {' and '.join(missing)}; pip install {' '.join(missing)}.")
    return {"gguf_file": file.name}
