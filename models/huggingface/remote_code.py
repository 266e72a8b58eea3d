"""Directories that bring Python files for their model or tokenizer: run only if the caller asks, never fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.safetensors_files import CheckpointError, read_json

REMEDY = "Read these files; if you trust them, pass --trust-remote-code (models.load(..., trust_remote_code=True))"


def check_model_code(path: Path, trusted: bool) -> None:
    """CheckpointError where config.json asks for code that is not trusted, or that lies in another repository.

    Untrusted, a model type that transformers has a causal LM for loads with transformers' own code, as there.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = path / "config.json"
    fields = read_json(file)
    named = _named(fields)
    family = fields.get("model_type")
    if not named or (not trusted and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return
    _refuse_elsewhere(file, named)
    if not trusted:
        raise CheckpointError(
            f"{file}: model_type is {family!r}, whose code is in the directory's own Python files ({', '.join(named)}: "
            f"auto_map); expected a model type that transformers has code for. {REMEDY}"
        )


def names_tokenizer_code(path: Path) -> bool:
    """Whether tokenizer_config.json names a class of the directory's own; transformers may do without it."""
    file = path / "tokenizer_config.json"
    return file.is_file() and bool(_named(read_json(file)))


def check_tokenizer_code(path: Path, trusted: bool) -> None:
    """check_model_code of a directory whose names_tokenizer_code is true: trusted, or needed in the end."""
    file = path / "tokenizer_config.json"
    named = _named(read_json(file))
    _refuse_elsewhere(file, named)
    if not trusted:
        raise CheckpointError(
            f"{file}: the tokenizer's code is in the directory's own Python files ({', '.join(named)}: auto_map); "
            f"expected a tokenizer that transformers has code for. {REMEDY}"
        )


def _named(fields: dict[str, Any]) -> list[str]:
    """The classes of auto_map, "file.Class" or "owner/repository--file.Class"; a tokenizer's are (slow, fast)."""
    auto_map = fields.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    listed = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(str(item) for item in listed if item))


def _refuse_elsewhere(file: Path, named: list[str]) -> None:
    if elsewhere := [name for name in named if "--" in name]:
        raise CheckpointError(
            f"{file}: auto_map names {elsewhere[0]!r}, code of another repository; expected a file beside it, since "
            "nothing is downloaded: copy that repository's Python files here and remove what stands before '--'"
        )
