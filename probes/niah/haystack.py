"""Haystacks as lines: `repeat` (five sentences over and over), `essay` (documents, one sentence a line), `noise`
(random words).

Lines never begin or end with white space, so a joint is always one line break between two visible characters: the
place where tokenizers split most reliably. Whether they do is checked (`Haystack.additive`), not assumed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from probes.niah.tokens import Encoder
from probes.niah.words import PLAIN

Documents = Mapping[str, str | Path] | Sequence[str | Path]
KINDS = ("repeat", "essay", "noise")
# our own five sentences; RULER's niah_single_1 repeats five others of the same kind
REPEATED: tuple[str, ...] = (
    "The bread is warm.",
    "The river is wide.",
    "The lamp is lit.",
    "On we walk.",
    "Round the bend and home.",
)
DEFAULT_ESSAY = "state_of_the_union_1905.txt"
NOISE_LINES = 2048
LONGEST_LINE = 240  # characters; longer sentences are cut at a clause or a word, so that depth stays fine-grained
_BLOCK = 64  # lines per additivity check
_NOISE_STREAM = (0, 0)  # spawn key of the noise lines; those of samples have length 1
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[A-Z0-9])|(?<=[。！？])")


@dataclass(frozen=True, eq=False)
class Haystack:
    """Lines with their ids. `counts` are tokens a line (its line break included), estimates unless `additive`."""

    kind: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    ids: tuple[np.ndarray, ...]
    counts: np.ndarray
    additive: bool

    def order(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """Line numbers that hold at least `tokens` tokens and one line more.

        repeat starts at its first sentence; essay at a random sentence, running on through the documents and round
        again if they are too short; noise draws lines with replacement.
        """
        needed = int(tokens // max(1, self.counts.min())) + 2
        if self.kind == "noise":
            return rng.integers(len(self.lines), size=needed)
        start = int(rng.integers(len(self.lines))) if self.kind == "essay" else 0
        return (start + np.arange(needed)) % len(self.lines)

    def sha256(self) -> str:
        """Hash of the lines, for results to record."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def make(kind: str, encoder: Encoder, seed: int, documents: Documents | None) -> Haystack:
    """Build the haystack `kind`; `documents` (named or not) belong to essay, which has a public-domain default."""
    if kind not in KINDS:
        raise ValueError(f"haystack is {kind!r}; expected one of {', '.join(KINDS)}")
    if documents is not None and kind != "essay":
        raise ValueError(
            f"documents were given with haystack {kind!r}, which does not read them; pass haystack='essay'"
        )
    names: tuple[str, ...] = ()
    if kind == "repeat":
        lines = REPEATED
    elif kind == "noise":
        lines = _noise_lines(seed)
    else:
        named = _named(documents)
        names = tuple(named)
        lines = tuple(line for text in named.values() for line in split_lines(text))
        if not lines:
            raise ValueError(f"documents {', '.join(names) or '()'} hold no text; expected at least one line")
    return _encode(kind, names, lines, encoder)


def _named(documents: Documents | None) -> dict[str, str]:
    if documents is None:
        return {DEFAULT_ESSAY: (files("probes") / "data" / DEFAULT_ESSAY).read_text(encoding="utf-8")}
    if isinstance(documents, str):
        raise ValueError("documents is one string; expected a sequence of strings or {name: text}; pass [text]")
    if not isinstance(documents, Mapping):
        documents = {
            f"document {i}" + (f", {text.name}" if isinstance(text, Path) else ""): text
            for i, text in enumerate(documents)
        }
    return {name: _read(text) for name, text in documents.items()}


def _read(text: str | Path) -> str:
    if not isinstance(text, Path):
        return text
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{text}: no readable text file ({error}); expected UTF-8 text") from error


def split_lines(text: str) -> list[str]:
    """One sentence a line, none longer than LONGEST_LINE characters; indentation and empty lines are dropped."""
    sentences = (part for line in text.splitlines() for part in _SENTENCE_END.split(line))
    return [piece for sentence in sentences for piece in _cut(" ".join(sentence.split()))]


def _cut(sentence: str) -> list[str]:
    pieces = []
    while len(sentence) > LONGEST_LINE:
        at = max(sentence.rfind(mark, LONGEST_LINE // 2, LONGEST_LINE) for mark in ("; ", ", ")) + 1
        at = at or sentence.rfind(" ", 1, LONGEST_LINE) + 1 or LONGEST_LINE
        pieces.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*pieces, sentence] if sentence else pieces


def _noise_lines(seed: int) -> tuple[str, ...]:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=_NOISE_STREAM)))
    words = np.asarray(PLAIN)[rng.integers(len(PLAIN), size=(NOISE_LINES, 14))]
    lengths = rng.integers(7, 15, size=NOISE_LINES)
    return tuple(" ".join(row[:n]) + "." for row, n in zip(words, lengths, strict=True))


def _encode(kind: str, names: tuple[str, ...], lines: tuple[str, ...], encoder: Encoder) -> Haystack:
    encoded = [encoder.line_ids(line + "\n") for line in lines]
    ids = tuple(piece for piece, _ in encoded)
    bos = encoder.bos_id
    for line, piece in zip(lines, ids, strict=True):
        if bos is not None and bos in piece:
            raise ValueError(
                f"the line {line[:60]!r} of the haystack encodes to the BOS id {bos}; remove the special token from it"
            )
        if len(piece) == 0:
            raise ValueError(f"the tokenizer encodes the haystack line {line[:60]!r} to no token; remove that line")
    additive = all(clean for _, clean in encoded)
    looped = [*range(len(lines)), 0]  # the last line is also followed by the first
    for start in range(0, len(lines), _BLOCK):
        if not additive:
            break
        block = looped[start : start + _BLOCK + 1]
        text = "".join(lines[i] + "\n" for i in block)
        additive = np.array_equal(encoder.line_ids(text)[0], np.concatenate([ids[i] for i in block]))
    return Haystack(kind, names, lines, ids, np.asarray([len(piece) for piece in ids]), additive)
