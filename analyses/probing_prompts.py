"""Needle prompts for probing: one exact length up to the probed position, and the same without their needle.

The probed token is the last one given: the last prompt token, or the last answer token that all classes share, given by
teacher forcing. The classes' next tokens there must all differ, or the model has no reason to hold the class there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from models.errors import InputError
from probes import niah
from probes.niah.tokens import Encoder, token_span
from probes.niah.wording import Template, fill

NULL = "null"  # the noise haystack with the needle taken out
DEPTH_BINS = 16
KEPT_BYTES = 256e6
Form = Literal["single", "multi_key"]  # the others ask for several values, and the class may stand behind others


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
        after_shared: bool, documents: Mapping[str, str] | None = None, depth: Sequence[float] | None = None,
        form: Form = "single", distractors: int = 0,
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
                    after_shared=after_shared, depth="uniform" if depth is None else depth, form=form,
                    distractors=distractors, documents=documents if kind == "essay" else None,
                )  # fmt: skip
        self._streams = [built[len(answer) - self.given] for answer in answers]
        self._kept: OrderedDict[tuple[int, int], Batch] = OrderedDict()

    @property
    def hashes(self) -> list[str]:
        """What decides the prompts, for the identity of a run."""
        return sorted({str(stream.metadata()["hash"]) for stream in self._streams})

    def batch(self, first: int, last: int) -> Batch:
        """Prompts first .. last - 1; kept, up to KEPT_BYTES, for the next model that is given them."""
        if (first, last) not in self._kept:
            self._kept[first, last] = self._built(first, last)
            while len(self._kept) > 1 and sum(batch.ids.nbytes for batch in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return self._kept[first, last]

    def _built(self, first: int, last: int) -> Batch:
        samples = [self._streams[index % len(self.values)][index] for index in range(first, last)]
        assert all(sample.probe == self.length - 1 for sample in samples)
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
    """niah.given_tokens, with what the command line can do about a refusal."""
    try:
        return niah.given_tokens(tokenizer, values, after_shared)
    except niah.ClassSetError as error:
        remedy = "use --values easy, or fewer --classes"
        if error.shared:
            behind = f"probe behind the {error.shared} tokens that all answers begin with"
            remedy = f"add --after-shared ({behind}), or {remedy}"
        raise InputError(f"{error.finding}; {remedy}") from error


def depth_bins(needle: Int[np.ndarray, " N"], length: int) -> np.ndarray:
    """One-hot depth of the needle [N, DEPTH_BINS], float32: a probe of position alone is linear."""
    return np.eye(DEPTH_BINS, dtype=np.float32)[needle * DEPTH_BINS // length]
