"""Needle-in-a-haystack prompts of an exact token length: build(...) -> a lazy sequence of samples.

Two ways give the same thing, input_ids == (BOS +) encode(text). If the tokenizer is additive at line ends (checked
for the haystack and, for each prompt, round its needles and its question), ids are put together from lines encoded
once. Otherwise needles and question are spliced into a haystack encoded as it stands, by windows that must agree with
it on both sides (or else the whole text is encoded), and the last lines are corrected until the length is exact, a
bounded number of times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload

import numpy as np

from probes.niah.classes import given_tokens
from probes.niah.filler import Filler
from probes.niah.haystack import Documents, make
from probes.niah.layout import Composer
from probes.niah.sample import NIAHSample
from probes.niah.tokens import Encoder, Tokenizer
from probes.niah.wording import FORMS, KEY_KINDS, VALUE_SETS, Parts, Template, draw_draft

ROOM = 8  # tokens of haystack that the shortest admitted prompt holds


@dataclass(frozen=True)
class Settings:
    """Everything a stream of prompts depends on beside the tokenizer and the documents."""

    length: int
    seed: int
    haystack: str = "repeat"
    depth: tuple[float, ...] | None = None  # None = uniform
    keys: str | tuple[str, ...] = "words"
    values: tuple[str, ...] = ()  # () = random 7-digit numbers
    after_shared: bool = False
    form: str = "single"
    distractors: int = 0  # needles beside the first one
    template: Template = field(default_factory=Template)
    bos: bool | None = None
    verify: int = 64

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}; expected one of {', '.join(FORMS)}")
        if self.depth is not None and not (self.depth and all(0.0 <= d <= 1.0 for d in self.depth)):
            raise ValueError(f"depth is {self.depth}; expected 'uniform' or a non-empty sequence of numbers in [0, 1]")
        if isinstance(self.keys, str) and self.keys not in KEY_KINDS:
            raise ValueError(f"keys is {self.keys!r}; expected one of {', '.join(KEY_KINDS)}, or a sequence of strings")
        for name, texts in (("keys", self.keys), ("values", self.values)):
            if isinstance(texts, tuple) and (
                len(set(texts)) != len(texts) or any(t != t.strip() or not t for t in texts)
            ):
                raise ValueError(f"{name} are {texts}; expected different non-empty strings without outer spaces")
        if not self.keys:
            raise ValueError("keys are empty; pass at least one key")
        for name, value, least in (
            ("length", self.length, 1),
            ("seed", self.seed, 0),
            ("distractors", self.distractors, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer >= {least}")
        if self.verify < 0:
            raise ValueError(f"verify is {self.verify}; expected 0 (never), 1 (every prompt) or k (every k-th prompt)")


class Prompts(Sequence[NIAHSample]):
    """Prompts built when asked for. Sample i depends on the settings, the documents, the tokenizer and i only.

    depth: share of the haystack in front of the needle: "uniform" (drawn per prompt), one number or a grid (cycled).
    keys: "words" (adjective-noun), "numbers", "uuids" or own strings.
    values: a class set, "easy" (the default), "hard" or own strings, taken in turn: sample.label; or "numbers" (random,
    7 digits). Classes whose answers begin with the same token are refused (ClassSetError), since the last prompt
    token then says nothing of them.
    after_shared: the answer tokens that all classes share are taken as given, and sample.probe lies behind them.
    form: "single"; "multi_key" (`distractors` further needles with other keys and values); "multi_value" (one key with
    1 + distractors values, all asked for, in the order of the text); "multi_query" (1 + distractors keys, all asked
    for). After RULER's tasks of these names.
    documents: texts of haystack "essay", or paths of text files, re-flowed to one sentence a line, from a random
    sentence on and round again if they are shorter than the prompt; default: a presidential message of 1905.
    bos: None = one BOS at index 0 if the tokenizer has a bos_id.
    verify: the text of every k-th prompt is encoded as a whole and must give the same ids (every prompt is checked
    round its needles and its question anyway); 1 = every prompt, 0 = none.

    Iterating streams (nothing is kept); indexing builds one; a slice builds its samples into a list. `minimum_length`
    is the least length that every prompt of these settings fits into; `additive` says which of the two ways is taken.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Settings, n: int, documents: Documents | None) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"n is {n!r}; expected an integer >= 0")
        self.settings, self.n = settings, n
        encoder = Encoder(tokenizer)
        haystack = make(settings.haystack, encoder, settings.seed, documents)
        given = self._given(tokenizer)
        self._composer = Composer(
            encoder, haystack, Filler(encoder), settings.template, settings.bos, settings.length, given
        )
        self._haystack = haystack
        self._probe = hashlib.sha256(
            json.dumps([encoder.encode(haystack.lines[0]), tokenizer.vocab_size]).encode()
        ).hexdigest()
        self.minimum_length = self._minimum_length()
        if settings.length < self.minimum_length:
            raise ValueError(
                f"length {settings.length} is too short: announcement, needles and question with their longest keys "
                f"take up to "
                f"{self.minimum_length - ROOM} tokens under this tokenizer, and {ROOM} are left for the haystack; "
                f"ask for at "
                f"least {self.minimum_length}"
            )

    def _given(self, tokenizer: Tokenizer) -> int:
        s = self.settings
        return given_tokens(tokenizer, s.values, s.after_shared, s.template) if s.values else 0

    @property
    def additive(self) -> bool:
        return self._haystack.additive

    def _draft(self, index: int) -> tuple[np.random.Generator, Any]:
        s = self.settings
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(s.seed, spawn_key=(index,))))
        classes = max(1, len(s.values))
        # classes cycle fastest, depths next, so that a depth grid and a value set are crossed, never confounded
        depth = None if s.depth is None else s.depth[index // classes % len(s.depth)]
        return rng, draw_draft(
            rng, form=s.form, extra=s.distractors, keys=s.keys, values=s.values, label=index % classes, depth=depth
        )

    def _minimum_length(self) -> int:
        """The longest frame over 64 drafts, widened by the spread seen: keys differ by a few tokens."""
        frames = [self._composer.frame(Parts.of(self._draft(i)[1], self.settings.template)) for i in range(64)]
        return max(frames) + (max(frames) - min(frames)) // 2 + ROOM

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> NIAHSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[NIAHSample]: ...
    def __getitem__(self, index: int | slice) -> NIAHSample | list[NIAHSample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.n))]
        i = index + self.n if index < 0 else index
        if not 0 <= i < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        rng, draft = self._draft(i)
        verify = bool(self.settings.verify) and i % self.settings.verify == 0
        return self._composer.sample(i, rng, draft, verify=verify, fall_back=self.settings.verify == 1)

    def __iter__(self) -> Iterator[NIAHSample]:
        return (self[i] for i in range(self.n))

    def metadata(self) -> dict[str, Any]:
        """JSON-able description for results: settings, hashes of template and haystack, `hash` of what decides ids."""
        s = asdict(self.settings)
        after_shared = s.pop("after_shared")  # where a prompt is probed changes no token of it
        s["template_sha256"] = self.settings.template.sha256()
        s |= {
            "documents": list(self._haystack.names),
            "haystack_sha256": self._haystack.sha256(),
            "haystack_lines": len(self._haystack.lines),
            "haystack_tokens": int(self._haystack.counts.sum()),
            "additive": self.additive,
            "tokenizer_probe": self._probe,
            "generator": "numpy PCG64, SeedSequence(seed, spawn_key=(index,))",
        }
        s = json.loads(json.dumps(s))
        digest = hashlib.sha256(json.dumps(s, sort_keys=True).encode()).hexdigest()
        return s | {"n": self.n, "hash": digest, "after_shared": after_shared}


def build(
    tokenizer: Tokenizer,
    *,
    length: int,
    n: int,
    seed: int,
    haystack: str = "repeat",
    depth: str | float | Sequence[float] = "uniform",
    keys: str | Sequence[str] = "words",
    values: str | Sequence[str] = "easy",
    after_shared: bool = False,
    form: str = "single",
    distractors: int = 3,
    documents: Documents | None = None,
    template: Template | None = None,
    bos: bool | None = None,
    verify: int = 64,
) -> Prompts:
    """n prompts of exactly `length` tokens, answer included, or a ValueError. Arguments: see `Prompts`."""
    settings = Settings(
        length=length,
        seed=seed,
        haystack=haystack,
        depth=_depths(depth),
        keys=keys if isinstance(keys, str) else tuple(keys),
        values=_value_set(values),
        after_shared=after_shared,
        form=form,
        distractors=0 if form == "single" else distractors,
        template=template or Template(),
        bos=bos,
        verify=verify,
    )
    return Prompts(tokenizer, settings, n, documents)


def _value_set(values: str | Sequence[str]) -> tuple[str, ...]:
    if values == "numbers":
        return ()
    if isinstance(values, str):
        if values not in VALUE_SETS:
            raise ValueError(
                f"values is {values!r}; expected numbers, {', '.join(VALUE_SETS)}, or a sequence of strings"
            )
        return VALUE_SETS[values]
    if not values:
        raise ValueError("values are empty; pass at least one value or 'numbers'")
    return tuple(values)


def _depths(depth: str | float | Sequence[float]) -> tuple[float, ...] | None:
    if isinstance(depth, str):
        if depth != "uniform":
            raise ValueError(f"depth is {depth!r}; expected 'uniform', a number in [0, 1] or a sequence of them")
        return None
    return tuple(float(d) for d in np.atleast_1d(np.asarray(depth, float)))
