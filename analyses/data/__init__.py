"""The embedded LongPPL evaluation: texts and their key tokens under an independent evaluator.

Two domains: "code" (modules of CPython 3.11), "documentation" (topic guides of Django 5.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.long_ppl import KeyTokens

FOLDER = Path(__file__).parent
FOLDERS = {"code": FOLDER, "documentation": FOLDER / "documentation"}
EVALUATOR = "smollm2-135m"


def texts(domain: str = "code") -> dict[str, str]:
    """Name -> the beginning of a module's source or of a guide, in order of names."""
    return {path.stem: read_text(path) for path in sorted((_folder(domain) / "texts").glob("*.txt"))}


def key_tokens(evaluator: str = EVALUATOR, domain: str = "code") -> dict[str, KeyTokens]:
    """Name -> its key tokens, in order of names; ValueError if there are none of that evaluator."""
    from probes.long_ppl import load_key_tokens

    folder = _folder(domain) / "key_tokens" / evaluator
    paths = sorted(folder.glob("*.json"))
    if not paths:
        there = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
        raise ValueError(f"{folder} holds no key tokens; evaluators with key tokens: {', '.join(there)}")
    return {path.stem: load_key_tokens(path) for path in paths}


def _folder(domain: str) -> Path:
    if domain not in FOLDERS:
        raise ValueError(f"domain is {domain!r}; expected {' or '.join(FOLDERS)}")
    return FOLDERS[domain]


def read_text(path: Path) -> str:
    """UTF-8, line ends untouched: offsets count the characters of the file as it is. ValueError names the file."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {path} cannot be read as UTF-8: {error}") from error
