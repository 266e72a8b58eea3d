"""One needle-in-a-haystack prompt with its spans, and the score of a model's predictions on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class NIAHSample:
    """A prompt up to and including the answer (teacher forcing). Spans are token ranges [start, end) of input_ids.

    The prompt of a generation test is input_ids[:answer_span[0]]. A token that holds both a digit of the value and
    something else belongs to the span. Forms with several values: `values`, `value_spans`, `answer_spans` follow the
    order of the question; value, value_span, key, key_span are those of the needle placed at the requested depth.
    """

    input_ids: Int32[np.ndarray, "T"]
    value_span: Span  # the value inside the haystack
    answer_span: Span  # the answer: the last tokens of input_ids, first to last value
    key_span: Span  # the key inside the needle
    depth: float  # realised: value_span[0] / len(input_ids)
    depth_requested: float  # share of the haystack in front of the needle, as asked for
    key: str
    value: str
    label: int  # index of value in the value set, -1 for random values
    index: int  # number of the sample in its stream, -1 for insert()
    values: tuple[str, ...]
    value_spans: tuple[Span, ...]
    answer_spans: tuple[Span, ...]
    answer_digits: tuple[int, ...]  # characters of a value held by each token of answer_span (0 between two values)
    distractors: tuple[tuple[str, str], ...]  # (key, value) of needles the question does not ask for
    probe: int  # the token at which `value` is to be read: the next one tells the classes apart


class Accuracy(NamedTuple):
    """all_correct: every token of every value is right. per_digit: share of the digits held by right tokens."""

    all_correct: bool
    per_digit: float


def accuracy(predicted: Any, sample: NIAHSample) -> Accuracy:
    """Score argmax ids (array, list or CPU tensor), under teacher forcing.

    `predicted` has one id per token of answer_span (the argmax at positions answer_span[0]-1 .. answer_span[1]-2), or
    one per token of input_ids (the argmax at every position). A wrong token loses all the digits it holds; with
    single-digit tokens per_digit is the plain share of right digits.
    """
    ids = np.asarray(predicted)
    start, end = sample.answer_span
    if ids.ndim != 1 or len(ids) not in (end - start, len(sample.input_ids)) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"predicted has shape {ids.shape} and dtype {ids.dtype}; expected integer ids of shape "
            f"({end - start},), one per "
            f"answer token, or ({len(sample.input_ids)},), one per position; pass logits.argmax(-1) of one sample"
        )
    if len(ids) == len(sample.input_ids):
        ids = ids[start - 1 : end - 1]
    digits = np.asarray(sample.answer_digits)
    right = ids == sample.input_ids[start:end]
    return Accuracy(bool(right[digits > 0].all()), float(digits[right].sum() / digits.sum()))
