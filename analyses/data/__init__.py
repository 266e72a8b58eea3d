"""The embedded LongPPL evaluation: texts (CPython 3.11 modules) and their key tokens under an independent evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.long_ppl import KeyTokens

FOLDER = Path(__file__).parent
EVALUATOR = "smollm2-135m"


def texts() -> dict[str, str]:
    """Module name -> the beginning of its source, in order of names."""
    return {path.stem: read_text(path) for path in sorted((FOLDER / "texts").glob("*.txt"))}


def key_tokens(evaluator: str = EVALUATOR) -> dict[str, KeyTokens]:
    """Module name -> its key tokens, in order of names; ValueError if there are none of that evaluator."""
    from probes.long_ppl import load_key_tokens

    folder = FOLDER / "key_tokens" / evaluator
    paths = sorted(folder.glob("*.json"))
    if not paths:
        there = sorted(path.name for path in (FOLDER / "key_tokens").iterdir() if path.is_dir())
        raise ValueError(f"{folder} holds no key tokens; evaluators with key tokens: {', '.join(there)}")
    return {path.stem: load_key_tokens(path) for path in paths}


def read_text(path: Path) -> str:
    """UTF-8, line ends untouched: offsets count the characters of the file as it is. ValueError names the file."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {path} cannot be read as UTF-8: {error}") from error
