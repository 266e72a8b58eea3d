"""Texts to run a model on: .txt, .jsonl and folders of them; the first T tokens of those that are long enough."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from models.errors import InputError

KEYS = ("text", "input", "prompt", "context")
SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True)
class Text:
    """`name` is that of the file without suffix, followed by :LINE for a line of a .jsonl file."""

    name: str
    content: str


@dataclass(frozen=True, eq=False)
class Cut:
    """The first tokens of N texts. `too_short` were skipped among the `examined` ones; none was padded."""

    names: list[str]
    ids: Int[np.ndarray, "N S"]
    n_tokens: Int[np.ndarray, " N"]
    """Tokens of each text before the cut, a BOS included."""
    bos: bool
    """Whether the tokenizer puts a BOS in front: token 0 of every row."""
    examined: int
    too_short: int
    longest: int
    """Tokens of the longest text examined."""

    @property
    def sha256(self) -> str:
        """Of the tokens that a model is given."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, dtype="<i8").tobytes()).hexdigest()


def read_texts(paths: Sequence[Path] | None) -> list[Text]:
    """All texts in order of the paths given, within a folder (searched to its depth) in order of names.

    None: the documents of analyses.data. Of a line of JSON the first of KEYS that is text counts. InputError naming
    file and line for what cannot be read, and if nothing is there.
    """
    from analyses import data

    if paths is None:
        return [Text(name, content) for name, content in data.texts().items()]
    found = [text for path in paths for file in _files(path) for text in _read(file)]
    if not found:
        listed = ", ".join(map(str, paths))
        raise InputError(f"--texts {listed}: no text found; give .txt files, .jsonl files or folders of them")
    return found


def first_tokens(texts: Sequence[Text], tokenizer: Any, length: int, count: int | None) -> Cut:
    """The first `length` tokens, a BOS included where the tokenizer uses one, of up to `count` texts that have them.

    The same texts for every count beyond theirs: they are taken in order. InputError if none is long enough.
    """
    front = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    names: list[str] = []
    rows: list[list[int]] = []
    lengths: list[int] = []
    examined = longest = 0
    for text in texts:
        if count is not None and len(rows) == count:
            break
        ids = tokenizer.encode(text.content)
        if front and ids[:1] != front:  # a text that spells it out has it already
            ids = front + ids
        examined, longest = examined + 1, max(longest, len(ids))
        if len(ids) >= length:
            names.append(text.name)
            rows.append(ids[:length])
            lengths.append(len(ids))
    if not rows:
        raise InputError(
            f"none of {examined} texts has {length} tokens, the longest {longest}; give longer texts, or --length "
            f"{longest} or less"
        )
    cut = np.array(rows, dtype=np.int64)
    return Cut(names, cut, np.array(lengths), bool(front), examined, examined - len(rows), longest)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not path.exists():
        raise InputError(f"--texts {path}: no such file or folder")
    if path.suffix not in SUFFIXES:
        raise InputError(f"--texts {path}: suffix {path.suffix!r}, expected {' or '.join(SUFFIXES)}, or a folder")
    return [path]


def _read(file: Path) -> Iterator[Text]:
    from analyses.data import read_text

    content = read_text(file)
    if file.suffix == ".txt":
        yield Text(file.stem, content)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield Text(f"{file.stem}:{number}", _text_of(line, f"{file}, line {number}"))


def _text_of(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); expected one object a line") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where} is a JSON {type(fields).__name__}; expected an object with one of {', '.join(KEYS)}")
    found = next((fields[key] for key in KEYS if isinstance(fields.get(key), str)), None)
    if found is None:
        raise InputError(f"{where} has {', '.join(fields) or 'no fields'}; expected text in one of {', '.join(KEYS)}")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a character ({error}); remove the lone surrogate") from error
    return found
