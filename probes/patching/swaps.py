"""Pairs of needle prompts that differ in the needle's value and in nothing else, token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from probes import niah
from probes.niah.sample import NIAHSample

POSITIONS = ("needle", "between", "last")
"""Groups of tokens: the value's own, those behind it, the last token, which has to predict the value. Everything before
the value is the same in both prompts, and so are all activations there."""


@dataclass(frozen=True, eq=False)
class ValueSwaps:
    """N pairs of T tokens; the last one predicts the first answer token in which the two values differ.

    Answer tokens before that one, which both values share, are given (teacher forcing).
    """

    clean: Int[np.ndarray, "N T"]
    corrupt: Int[np.ndarray, "N T"]
    needle: Int[np.ndarray, "N 2"]
    """Tokens [first, stop) of the value inside the prompt."""
    right: Int[np.ndarray, " N"]
    """The token that the clean prompt goes on with."""
    wrong: Int[np.ndarray, " N"]
    """The one that the corrupted prompt goes on with."""
    whole: Int[np.ndarray, "N A"]
    """The clean prompts with their whole answer, which begins at token `answer`."""
    answer: int
    digits: Int[np.ndarray, "N answer_tokens"]
    """Digits of the value that each answer token holds."""
    label: Int[np.ndarray, " N"]
    """Class of the clean value."""

    def __len__(self) -> int:
        return len(self.clean)

    def select(self, first: int, last: int) -> ValueSwaps:
        """Pairs first .. last - 1."""
        rows = slice(first, last)
        return ValueSwaps(
            self.clean[rows], self.corrupt[rows], self.needle[rows], self.right[rows], self.wrong[rows],
            self.whole[rows], self.answer, self.digits[rows], self.label[rows],
        )  # fmt: skip

    def positions(self) -> Bool[np.ndarray, "P N T"]:
        """Which tokens belong to each group of POSITIONS."""
        at = np.arange(self.clean.shape[1])[None]
        first, stop = self.needle[:, :1], self.needle[:, 1:]
        last = at == at.shape[1] - 1
        return np.stack([(at >= first) & (at < stop), (at >= stop) & ~last, last & (at >= stop)])

    @property
    def sha256(self) -> str:
        """Of all that decides a result."""
        digest = hashlib.sha256(str(self.answer).encode())
        for array in (self.clean, self.corrupt, self.needle, self.right, self.wrong, self.whole, self.digits):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()


def value_swaps(
    tokenizer: Any,
    *,
    length: int,
    n: int,
    seed: int,
    haystack: str = "essay",
    values: str | Sequence[str] = "easy",
    **options: Any,
) -> ValueSwaps:
    """n pairs of niah.build; the corrupted prompt has the next value of the set, keys, depths and text being the same.

    `length` counts the whole answer in, as in niah.build, which also takes `options`. Raises ValueError for what cannot
    be built, for fewer than two values, and for values that differ in their number of tokens.
    """
    if values == "numbers":
        raise ValueError("values is 'numbers', random for every prompt; expected 'easy', 'hard' or a list to swap in.")
    chosen = niah.VALUE_SETS[values] if isinstance(values, str) and values in niah.VALUE_SETS else values
    if isinstance(chosen, str) or len(chosen) < 2:
        raise ValueError(f"values is {values!r}; expected 'easy', 'hard' or at least two values to swap.")
    settings: dict[str, Any] = {"length": length, "n": n, "seed": seed, "haystack": haystack, **options}
    built = [niah.build(tokenizer, values=order, **settings) for order in (chosen, [*chosen[1:], chosen[0]])]
    return pair(list(built[0]), list(built[1]))


def pair(clean: Sequence[NIAHSample], corrupt: Sequence[NIAHSample]) -> ValueSwaps:
    """Pairs of samples of probes.niah. ValueError unless both differ exactly in their value, at the same tokens.

    All pairs must have one length, and differ from the same answer token on.
    """
    if not clean or len(clean) != len(corrupt):
        raise ValueError(f"{len(clean)} clean and {len(corrupt)} corrupted prompts; expected pairs, at least one.")
    cuts = [_checked(one, other) for one, other in zip(clean, corrupt, strict=True)]
    shapes = {(len(one.input_ids), one.answer_span[0], cut) for one, cut in zip(clean, cuts, strict=True)}
    if len(shapes) > 1:
        raise ValueError(
            f"the pairs have {len(shapes)} different (length, first answer token, first token that differs), such as "
            f"{sorted(shapes)[:2]}; expected one. Use values with as many tokens that differ from their first one on."
        )
    (_, answer, cut), whole = next(iter(shapes)), np.stack([one.input_ids for one in clean]).astype(np.int64)
    other = np.stack([one.input_ids for one in corrupt]).astype(np.int64)
    return ValueSwaps(
        whole[:, :cut], other[:, :cut], np.array([one.value_span for one in clean]), whole[:, cut], other[:, cut],
        whole, answer, np.array([one.answer_digits for one in clean]), np.array([one.label for one in clean]),
    )  # fmt: skip


def _checked(clean: NIAHSample, corrupt: NIAHSample) -> int:
    """The place of the first answer token that differs."""
    spans = [(s.value_span, s.answer_span, len(s.input_ids)) for s in (clean, corrupt)]
    if spans[0] != spans[1]:
        raise ValueError(
            f"sample {clean.index}: values {clean.value} and {corrupt.value} have (value, answer, length) {spans[0]} "
            f"and {spans[1]}; expected the same tokens. Use values of one number of tokens under this tokenizer."
        )
    apart = np.flatnonzero(clean.input_ids != corrupt.input_ids)
    (first, stop), (answer, end) = clean.value_span, clean.answer_span
    outside = apart[~((apart >= first) & (apart < stop)) & (apart < answer)]
    if len(outside) or not len(apart[apart < answer]):
        found = f"at token {outside[0]}, outside its value" if len(outside) else "nowhere in its value"
        raise ValueError(
            f"sample {clean.index}: clean and corrupted prompt differ {found} [{first}, {stop}); expected a difference "
            "there and nowhere else. Build both from one seed, with different values."
        )
    return int(apart[(apart >= answer) & (apart < end)][0])
