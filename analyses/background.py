"""The texts round the measured ones: they say how frequent a token and how rare an n-gram is, and stand in front of a
document that is measured beyond the training length.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from models.errors import InputError
from probes import repeat_copy

MOST_TEXTS = 64


@dataclass(frozen=True, eq=False)
class Background:
    """In one tokenizer, without BOS: `ids` of each text, and what they count."""

    ids: Mapping[str, Int[np.ndarray, " T"]]
    token_counts: Counter[int]
    ngram_counts: Counter[repeat_copy.Ngram]
    """In how many of the texts an n-gram occurs."""

    def before(self, name: str, length: int) -> Int[np.ndarray, " T"]:
        """The last `length` tokens of the texts that follow `name` in order of names, round to the one before it.

        Never tokens of `name` itself. InputError if the other texts have fewer.
        """
        names = list(self.ids)
        at = names.index(name)
        taken: list[np.ndarray] = []
        for other in (*names[at + 1 :], *names[:at]):
            if sum(map(len, taken)) >= length:
                break
            taken.append(self.ids[other])
        found = np.concatenate([*taken, np.zeros(0, dtype=np.int64)])
        if len(found) < length:
            raise InputError(
                f"--lengths: the {len(names) - 1} texts beside {name!r} have {len(found)} tokens, {length} have to "
                "stand in front of it; give a folder with more texts, or smaller --lengths"
            )
        return found[len(found) - length :]


def background_texts(texts: Path | None, domain: str, measured: Mapping[str, str]) -> dict[str, str]:
    """The measured texts and others of their folder in order of names, at most MOST_TEXTS in all (or the measured)."""
    from analyses import data

    names = data.texts(domain) if texts is None else {path.stem: path for path in sorted(texts.glob("*.txt"))}
    room = max(0, MOST_TEXTS - len(measured))
    chosen = [*measured, *[name for name in names if name not in measured][:room]]
    return {name: measured[name] if name in measured else str(_text(names[name])) for name in sorted(chosen)}


def _text(where: Path | str) -> str:
    from analyses import data

    return data.read_text(where) if isinstance(where, Path) else where


def sha256(texts: Mapping[str, str]) -> str:
    """Of names and contents."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()


def in_tokens(texts: Mapping[str, str], tokenizer: Any, ngram: int) -> Background:
    """The same texts in a model's tokenizer."""
    ids = {name: np.asarray(tokenizer.encode_with_offsets(text)[0], dtype=np.int64) for name, text in texts.items()}
    rows: Sequence[list[int]] = [row.tolist() for row in ids.values()]
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row)
    return Background(ids, counts, repeat_copy.document_counts(rows, ngram))
