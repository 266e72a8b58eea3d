"""Needle prompts for probing: one exact length up to the probed position, and the same without their needle.

The probed token is the last one given: the last prompt token, or the last answer token that all classes share, given by
teacher forcing. The classes' next tokens there must all differ, or the model has no reason to hold the class there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from models.errors import InputError
from probes import niah
from probes.niah.tokens import Encoder, token_span
from probes.niah.wording import Template, fill

NULL = "null"  # the noise haystack with the needle taken out
DEPTH_BINS = 16


@dataclass(frozen=True, eq=False)
class Batch:
    """`ids` end in the probed token; `label` is the class; `needle` the first token of the value inside the prompt."""

    ids: Int[np.ndarray, "N T"]
    label: Int[np.ndarray, " N"]
    needle: Int[np.ndarray, " N"]


class ProbingPrompts:
    """n prompts of exactly `length` tokens that end in the probed one; built when asked for.

    Answers of different token counts would end prompts of one length at different places, which alone would tell the
    class: each class has its own stream, longer by its answer. InputError for a value set that cannot be probed there.
    """

    def __init__(
        self, tokenizer: Any, *, haystack: str, length: int, n: int, seed: int, values: tuple[str, ...],
        after_shared: bool, documents: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.values, self.length, self.n = tokenizer, values, length, n
        self.without_needle = haystack == NULL
        self.given = given_tokens(tokenizer, values, after_shared)
        answers = niah.answer_tokens(tokenizer, values)
        kind = "noise" if self.without_needle else haystack
        built: dict[int, niah.Prompts] = {}
        for answer in answers:
            extra = len(answer) - self.given
            if extra not in built:
                built[extra] = niah.build(
                    tokenizer, length=length + extra, n=n, seed=seed, haystack=kind, values=values,
                    documents=documents if kind == "essay" else None,
                )  # fmt: skip
        self._streams = [built[len(answer) - self.given] for answer in answers]

    @property
    def hashes(self) -> list[str]:
        """What decides the prompts, for the identity of a run."""
        return sorted({str(stream.metadata()["hash"]) for stream in self._streams})

    def batch(self, first: int, last: int) -> Batch:
        """Prompts first .. last - 1."""
        samples = [self._streams[index % len(self.values)][index] for index in range(first, last)]
        rows = [sample.input_ids[: self.length] for sample in samples]
        if self.without_needle:
            rows = [self._emptied(row, sample) for row, sample in zip(rows, samples, strict=True)]
        needle = np.array([sample.value_span[0] for sample in samples])
        return Batch(np.stack(rows).astype(np.int64), np.array([sample.label for sample in samples]), needle)

    def _emptied(self, row: np.ndarray, sample: niah.NIAHSample) -> np.ndarray:
        """The needle's line overwritten by as many tokens of the text before it, or behind it where it comes first."""
        filled = fill(Template().needle, sample.key, (sample.value,))
        piece = Encoder(self.tokenizer).line(filled.text + "\n")
        lead = token_span(piece.offsets, *filled.values[0])[0]
        start = sample.value_span[0] - lead
        end = start + len(piece.ids)
        if start < 0 or not np.array_equal(row[start:end], piece.ids):
            raise InputError(
                f"prompt {sample.index}: the needle {filled.text!r} has no tokens of its own under this tokenizer, so "
                "it cannot be taken out; leave null out of --controls"
            )
        donor = row[start - len(piece.ids) : start] if start >= len(piece.ids) else row[end : end + len(piece.ids)]
        return np.concatenate([row[:start], donor, row[end:]])


def given_tokens(tokenizer: Any, values: tuple[str, ...], after_shared: bool) -> int:
    """Answer tokens given before the class is probed; InputError where the next tokens do not tell all classes apart.

    0, or with `after_shared` as many as all answers share.
    """
    answers = niah.answer_tokens(tokenizer, values)
    shared = niah.shared_answer_tokens(tokenizer, values)
    given = shared if after_shared else 0
    following = {answer[given : given + 1] for answer in answers}
    if len(following) == len(values):
        return given
    where = f"after the {given} answer tokens that they share" if given else "after the last prompt token"
    remedy = "use --values easy, or fewer --classes"
    if shared and not after_shared:
        remedy = f"add --after-shared (probe behind the {shared} tokens that all answers begin with), or {remedy}"
    raise InputError(
        f"{where} the {len(values)} values {values[0]} ... {values[-1]} go on with {len(following)} different "
        f"token(s) under this tokenizer, expected {len(values)}: what a probe there finds is not the class; {remedy}"
    )


def depth_bins(needle: Int[np.ndarray, " N"], length: int) -> np.ndarray:
    """One-hot depth of the needle [N, DEPTH_BINS], float32: a probe of position alone is linear."""
    return np.eye(DEPTH_BINS, dtype=np.float32)[needle * DEPTH_BINS // length]
