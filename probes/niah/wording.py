"""The words of a needle prompt: its sentences, the named value sets, and the seeded draw of keys and values.

announcement \\n haystack ... needle \\n ... haystack \\n question VALUE        after RULER's niah (Hsieh et al. 2024,
arXiv:2404.06654) The needle sentence is RULER's; announcement, question and the repeated sentences are our own
wording of the same shape.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from probes.niah.words import ADJECTIVES, NOUNS

EASY = ("1234567", "2345678", "3456789", "4567890", "5678901", "6789012", "7890123", "8901234")
HARD = tuple(str(31415920 + i) for i in range(8))
VALUE_SETS: dict[str, tuple[str, ...]] = {"easy": EASY, "hard": HARD}
FORMS = ("single", "multi_key", "multi_value", "multi_query")
KEY_KINDS = ("words", "numbers", "uuids")
DIGITS = 7


@dataclass(frozen=True)
class Template:
    """Sentences of a prompt; `{key}` and `{value}` are filled in. `_many`: multi_value and multi_query."""

    announce: str = "A special magic number is hidden in the text below. Memorize it."
    announce_many: str = "Special magic numbers are hidden in the text below. Memorize them."
    needle: str = "One of the special magic numbers for {key} is: {value}."
    question: str = (
        "What is the special magic number for {key} given in the text? "
        "The special magic number for {key} given in the text is {value}"
    )
    question_many: str = (
        "What are all the special magic numbers for {key} given in the text? "
        "The special magic numbers for {key} given in the text are {value}"
    )

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            slots = ("{key}", "{value}") if not name.startswith("announce") else ()
            if (
                any(slot not in text for slot in slots)
                or text.count("{value}") > 1
                or "\n" in text
                or text != text.strip()
            ):
                raise ValueError(
                    f"Template.{name} is {text!r}; expected one line without outer spaces, holding "
                    f"{' and '.join(slots) or 'no slots'} ({{value}} once). Change that field."
                )
        for name in ("question", "question_many"):
            if not getattr(self, name).endswith("{value}"):
                raise ValueError(f"Template.{name} must end in {{value}}: the value is the last thing of a prompt.")

    def sha256(self) -> str:
        """Hash of all sentences, for results to record."""
        return hashlib.sha256("\n".join(asdict(self).values()).encode()).hexdigest()


class Filled(NamedTuple):
    """A sentence with its slots filled, and where they are in characters: (start, end) pairs."""

    text: str
    values: tuple[tuple[int, int], ...]
    key: tuple[int, int]  # the first occurrence of the key


def fill(sentence: str, key: str, values: Sequence[str]) -> Filled:
    """Fill `{key}` and `{value}`; several values are joined as "a, b, c". The template, not a search, says where they
    are.
    """
    before, after = (part.replace("{key}", key) for part in sentence.split("{value}"))
    spans, at = [], len(before)
    for value in values:
        spans.append((at, at + len(value)))
        at += len(value) + len(", ")
    key_start = sentence.index("{key}")
    if key_start > sentence.index("{value}"):
        key_start += len(", ".join(values)) - len("{value}")
    return Filled(before + ", ".join(values) + after, tuple(spans), (key_start, key_start + len(key)))


class Draft(NamedTuple):
    """What one prompt says, before it is laid out: needle 0 is the one placed at the requested depth."""

    needles: tuple[tuple[str, str], ...]  # (key, value)
    asked: tuple[int, ...]  # needles the question asks for
    depths: tuple[float, ...]  # requested, one per needle
    label: int  # index of needle 0's value in the value set, -1 for random values


def draw_key(rng: np.random.Generator, keys: str | tuple[str, ...]) -> str:
    """One key: an adjective-noun pair, a 7-digit number, a version-4 uuid, or a member of a given tuple."""
    if isinstance(keys, tuple):
        return keys[int(rng.integers(len(keys)))]
    if keys == "words":
        return f"{ADJECTIVES[int(rng.integers(len(ADJECTIVES)))]}-{NOUNS[int(rng.integers(len(NOUNS)))]}"
    if keys == "numbers":
        return draw_number(rng, DIGITS)
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def draw_number(rng: np.random.Generator, digits: int) -> str:
    """A decimal number of exactly `digits` digits, the first one not 0."""
    return str(int(rng.integers(10 ** (digits - 1), 10**digits)))


def _distractor_value(rng: np.random.Generator, values: tuple[str, ...], taken: set[str]) -> str:
    """A value that is none of the set's members, so that a class never occurs as a distractor; as many digits as they
    have.
    """
    digits = len(values[0]) if values and values[0].isdigit() else DIGITS
    for _ in range(1000):
        value = draw_number(rng, digits)
        if value not in taken and value not in values:
            return value
    raise ValueError(
        f"no unused {digits}-digit value is left beside {len(taken) + len(values)} taken ones; use longer values"
    )


def draw_draft(
    rng: np.random.Generator,
    *,
    form: str,
    extra: int,
    keys: str | tuple[str, ...],
    values: tuple[str, ...],
    label: int,
    depth: float | None,
) -> Draft:
    """Draw keys, values and depths of one prompt. `depth` None = uniform in [0, 1); other draws do not change."""
    drawn_depth = float(rng.random())
    count = 1 if form == "single" else 1 + extra
    chosen = [draw_key(rng, keys)]
    for _ in range(1000):
        if form == "multi_value" or len(chosen) == count:
            break
        key = draw_key(rng, keys)
        if key not in chosen:
            chosen.append(key)
    if form != "multi_value" and len(chosen) < count:
        raise ValueError(f"keys hold fewer than {count} different ones, which form {form!r} needs; pass more keys")
    if form == "multi_value":
        chosen = chosen * count
    drawn = [values[label] if values else draw_number(rng, DIGITS)]
    while len(drawn) < count:
        drawn.append(_distractor_value(rng, values, set(drawn)))
    depths = (drawn_depth if depth is None else depth, *(float(rng.random()) for _ in range(count - 1)))
    asked = (0,) if form in ("single", "multi_key") else tuple(range(count))
    if form == "multi_value":  # the question's list follows the text, since nothing else orders the values of one key
        asked = tuple(sorted(asked, key=lambda i: (depths[i], i)))
    return Draft(tuple(zip(chosen, drawn, strict=True)), asked, depths, label if values else -1)


def question_of(draft: Draft, template: Template) -> Filled:
    """The question with its answer; keys of several queries are joined as "a, b and c"."""
    keys = list(dict.fromkeys(draft.needles[i][0] for i in draft.asked))
    key = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    sentence = template.question if len(draft.asked) == 1 else template.question_many
    return fill(sentence, key, [draft.needles[i][1] for i in draft.asked])


class Parts(NamedTuple):
    """The fixed lines of a prompt."""

    announce: str
    needles: tuple[Filled, ...]
    question: Filled
    values: tuple[str, ...]  # in the order of the question

    @classmethod
    def of(cls, draft: Draft, template: Template) -> Parts:
        announce = template.announce if len(draft.asked) == 1 else template.announce_many
        needles = tuple(fill(template.needle, key, (value,)) for key, value in draft.needles)
        return cls(announce, needles, question_of(draft, template), tuple(draft.needles[i][1] for i in draft.asked))
