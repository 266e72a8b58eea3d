"""Prompts for retrieval tracing as plain arrays: needle prompts of probes.niah, or others with the same spans."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from models.errors import InputError
from probes import niah

FIRST_ANSWER = 4  # tokens before the answer: entropy is that of the last four


@dataclass(frozen=True, eq=False)
class RetrievalPrompts:
    """N prompts of T tokens that end in their answer; value and answer are token ranges [first, stop)."""

    ids: Int[np.ndarray, "N T"]
    value: Int[np.ndarray, "N 2"]
    answer: Int[np.ndarray, "N 2"]
    digits: Sequence[Sequence[int]] = field(default_factory=list)
    """Digits that each answer token holds; empty: one each."""

    @property
    def sha256(self) -> str:
        """Of all that decides a result."""
        digest = hashlib.sha256(json.dumps([[int(n) for n in row] for row in self.digits]).encode())
        for array in (self.ids, self.value, self.answer):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def weights(self, row: int) -> Int[np.ndarray, " A"]:
        """Digits held by each token of a prompt's answer."""
        first, stop = self.answer[row]
        return np.asarray(self.digits[row]) if len(self.digits) else np.ones(stop - first, dtype=int)

    def select(self, first: int, last: int) -> RetrievalPrompts:
        """Prompts first .. last - 1."""
        rows = slice(first, last)
        return RetrievalPrompts(self.ids[rows], self.value[rows], self.answer[rows], self.digits[rows])

    def alike(self, size: int) -> Iterator[Int[np.ndarray, " B"]]:
        """Rows in batches of up to `size` whose answers begin at one place and whose values have one length."""
        keys: dict[tuple[int, int], list[int]] = {}
        for row, (value, answer) in enumerate(zip(self.value, self.answer, strict=True)):
            keys.setdefault((int(answer[0]), int(value[1] - value[0])), []).append(row)
        for rows in keys.values():
            for start in range(0, len(rows), size):
                yield np.array(rows[start : start + size])


def needle_prompts(tokenizer: Any, *, length: int, n: int, seed: int, haystack: str) -> RetrievalPrompts:
    """Prompts 0 .. n - 1 of one stream; InputError if the length does not fit."""
    try:
        samples = list(niah.build(tokenizer, length=length, n=n, seed=seed, haystack=haystack, values="numbers"))
    except ValueError as error:
        raise InputError(f"--length {length}, --haystack {haystack}: {error}") from error
    return RetrievalPrompts(
        np.stack([sample.input_ids for sample in samples]).astype(np.int64),
        np.array([sample.value_span for sample in samples]),
        np.array([sample.answer_span for sample in samples]),
        [sample.answer_digits for sample in samples],
    )


def read_prompts(path: Path) -> RetrievalPrompts:
    """Own prompts from an .npz file; InputError naming the array for what does not fit together."""
    try:
        with np.load(path) as arrays:
            found = {name: arrays[name] for name in ("ids", "value", "answer")}
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"--prompts {path} ({error}); expected an .npz file with ids, value and answer") from error
    ids, value, answer = (found[name] for name in ("ids", "value", "answer"))
    shapes = {name: list(array.shape) for name, array in found.items()}
    if any(array.dtype.kind not in "iu" for array in found.values()):
        raise InputError(f"--prompts {path}: types are {[str(a.dtype) for a in found.values()]}; expected integers")
    if ids.ndim != 2 or shapes["value"] != [len(ids), 2] or shapes["answer"] != [len(ids), 2]:
        raise InputError(f"--prompts {path}: shapes are {shapes}; expected ids [N, T], value [N, 2], answer [N, 2]")
    fits = (value[:, 0] >= 0) & (value[:, 0] < value[:, 1]) & (value[:, 1] <= answer[:, 0])
    fits &= (answer[:, 0] >= FIRST_ANSWER) & (answer[:, 0] < answer[:, 1]) & (answer[:, 1] == ids.shape[1])
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise InputError(
            f"--prompts {path}: prompt {row} has value {value[row].tolist()}, answer {answer[row].tolist()} in "
            f"{ids.shape[1]} tokens; expected first < stop, the value before the answer, the answer last and behind "
            f"{FIRST_ANSWER} tokens or more"
        )
    return RetrievalPrompts(ids.astype(np.int64), value.astype(np.int64), answer.astype(np.int64))
