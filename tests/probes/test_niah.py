"""Needle prompts: exact lengths, spans against an independent re-reading of the text, refusals, laziness, scores."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from probes import niah
from probes.niah.crossing import Crossing
from probes.niah.haystack import REPEATED, Haystack, split_lines
from probes.niah.seams import Side, run_of, weld
from probes.niah.tokens import Encoder
from probes.niah.words import ADJECTIVES, NOUNS, PLAIN

NEEDLE = "One of the special magic numbers for "
EMOJI = ["Grüße an alle 🙂🙂. Ça va très bien, 東京は大きい。京都は古い。 The family 👩‍👩‍👧 went home. " * 9]
DECOYS = [
    "The code 1234567 is on the door. She wrote 1234567 twice, and 12345678 once. One of the special magic numbers for "
    "nobody was 1234567. The rest is 7654321 and more of 1234567 here."
]
PROSE = [f"{' '.join(PLAIN[i : i + 9]).capitalize()}. It was number {i * 7919 % 10**7} of {i}." for i in range(200)]


class Tok:
    """The library's tokenizer protocol round a `tokenizers` object; counts the characters it encodes."""

    def __init__(self, raw, bos_id=None, adds_bos=False):
        self.raw, self.bos_id, self.adds_bos = raw, bos_id, adds_bos
        self.vocab_size = raw.get_vocab_size()
        self.characters = 0

    def encode(self, text):
        self.characters += len(text)
        ids = self.raw.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if self.adds_bos else ids

    def decode(self, ids):
        return self.raw.decode(list(ids), skip_special_tokens=False)

    def encode_with_offsets(self, text):
        self.characters += len(text)
        out = self.raw.encode(text, add_special_tokens=False)
        if self.adds_bos:
            return [self.bos_id, *out.ids], [(0, 0), *out.offsets]
        return out.ids, out.offsets


class ZeroWidth(Tok):
    def encode_with_offsets(self, text):
        ids, offsets = super().encode_with_offsets(text)
        return ids, [(a, a) for a, _ in offsets]


class NoOffsets(Tok):
    def encode_with_offsets(self, text):
        raise NotImplementedError("slow tokenizer")


class AddsEos(Tok):
    def encode(self, text):
        return [*super().encode(text), 0]

    def encode_with_offsets(self, text):
        ids, offsets = super().encode_with_offsets(text)
        return [*ids, 0], [*offsets, (len(text), len(text))]


def _byte_level(*, digits=False, regex=True, size=700, extra=()):
    raw = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|eot|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["\n".join(PROSE), *EMOJI, *extra], trainer)
    return raw


@cache
def _raw(name):
    if name == "digits":
        return _byte_level(digits=True)
    if name == "merged":
        return _byte_level(extra=[f"is: {i * 99991 % 10**7}." for i in range(900)], size=900)
    if name == "across lines":  # no pre-tokenizer: merges over spaces and line ends, ".\nThe" may be one token
        lines = [".\nOne of the. is: 12345.\n" + "\n".join(PROSE[i : i + 9]) for i in range(190)]
        return _byte_level(regex=False, extra=lines, size=900)
    if name == "triples":  # Llama-3-like: up to three digits a token, ".\n" one token
        raw = Tokenizer(models.BPE())
        pattern = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=1500,
            special_tokens=["<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(["\n".join(PROSE), *(f"{i:03d} x" for i in range(1000))], trainer)
        return raw
    if name == "metaspace":  # SentencePiece-like: a space is put in front of the text, decoding drops it
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        specials = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
        raw.train_from_iterator(["\n".join(PROSE), "\n".join(map(str, range(9999)))], trainer)
        return raw
    assert name == "words"
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    template = niah.Template()
    text = [*ADJECTIVES, *NOUNS, *PLAIN, *PROSE, *REPEATED, *vars(template).values(), "{ } , and - .", *"0123456789"]
    raw.train_from_iterator(text, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False))
    return raw


def make(name):
    kinds = {
        "auto bos": lambda: Tok(_raw("triples"), bos_id=0, adds_bos=True),
        "bos": lambda: Tok(_raw("triples"), bos_id=0),
        "zero width": lambda: ZeroWidth(_raw("merged")),
        "zero width, across lines": lambda: ZeroWidth(_raw("across lines")),
        "no offsets": lambda: NoOffsets(_raw("metaspace"), bos_id=1),
    }
    return kinds[name]() if name in kinds else Tok(_raw(name))


NAMES = [
    "digits", "merged", "across lines", "metaspace", "words", "auto bos", "bos", "zero width",
    "zero width, across lines", "no offsets",
]  # fmt: skip
ADDITIVE = {"digits", "merged", "words", "auto bos", "bos", "zero width"}


def squeeze(text):
    """Word-level decoding puts spaces between tokens: compare without white space."""
    return "".join(text.split())


def check(tok, sample, length, *, needles=1):
    """What holds for every sample, read from the ids alone."""
    ids = sample.input_ids.tolist()
    assert len(ids) == length
    assert sample.input_ids.dtype == np.int32
    body = ids
    if tok.bos_id is not None:
        assert [i for i, x in enumerate(ids) if x == tok.bos_id] == [0]
        body = ids[1:]
    text = tok.decode(body)
    again = tok.encode(text)
    assert (again[1:] if tok.bos_id is not None and again[:1] == [tok.bos_id] else again) == body
    flat = squeeze(text)
    for value, span, answer in zip(sample.values, sample.value_spans, sample.answer_spans, strict=True):
        needle = squeeze(f"{NEEDLE}{sample.key if len(sample.values) == 1 else ''}")
        assert needle in flat
        assert flat.count(f"is:{value}.") == 1
        _tight(tok, ids, span, value)
        _tight(tok, ids, answer, value)
        assert span[1] <= answer[0] + 1
        # what stands directly before the first token of the value's span, and in it, ends the needle's "is: "
        before = squeeze(tok.decode(ids[: span[0]]) + tok.decode(ids[slice(*span)]))
        assert before[: before.rindex(value)].endswith("is:")
    assert flat.count(squeeze(NEEDLE)) == needles
    assert sample.answer_span[1] == length
    assert flat.endswith(sample.values[-1])
    assert squeeze(sample.key) in squeeze(tok.decode(ids[slice(*sample.key_span)]))
    assert sample.key_span[1] <= sample.value_span[0]
    assert sample.depth == sample.value_span[0] / length
    assert len(sample.answer_digits) == sample.answer_span[1] - sample.answer_span[0]
    assert min(sum(sample.answer_digits), 1) == 1


def _tight(tok, ids, span, value):
    """The span decodes to the value, and no longer does so without its first or its last token."""
    start, end = span
    assert value in squeeze(tok.decode(ids[start:end]))
    assert value not in squeeze(tok.decode(ids[start + 1 : end]))
    assert value not in squeeze(tok.decode(ids[start : end - 1]))


# class sets that a tokenizer cannot be probed with: "12" may take the space before it along where "23" does not
REFUSED = {
    "easy": {"metaspace", "no offsets"},
    "hard": {"merged", "zero width", "across lines", "zero width, across lines", "metaspace", "no offsets"},
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    haystack=st.sampled_from(["repeat", "repeat", "essay", "emoji", "decoys", "noise"]),
    form=st.sampled_from(["single", "single", "multi_key", "multi_value", "multi_query"]),
    extra=st.integers(0, 700),
    seed=st.integers(0, 2**40),
    depth=st.one_of(st.just("uniform"), st.floats(0, 1)),
    values=st.sampled_from(["numbers", "easy", "hard"]),
)
def test_every_sample_is_exact_and_its_spans_hold(name, haystack, form, extra, seed, depth, values):
    tok = make(name)
    if name in REFUSED.get(values, ()):
        values = "numbers"
    documents = {"essay": PROSE[:40], "emoji": EMOJI, "decoys": DECOYS}.get(haystack)
    if name in ("words", "metaspace", "no offsets"):  # these spell no emoji back
        documents = PROSE[:40] if documents else None
    kwargs = {
        "n": 12, "seed": seed, "haystack": "essay" if documents else haystack if haystack == "noise" else "repeat",
        "form": form, "distractors": 2, "depth": depth, "documents": documents, "verify": 1,
        "values": ["1234567"] if haystack == "decoys" else values, "after_shared": values == "hard",
    }  # fmt: skip
    with pytest.raises(ValueError, match="ask for at least") as refusal:
        niah.build(tok, length=16, **{**kwargs, "haystack": "repeat", "documents": None})
    length = int(str(refusal.value).rsplit(" ", 1)[1]) + extra
    prompts = niah.build(tok, length=length, **kwargs)
    assert length >= prompts.minimum_length
    index = seed % 12
    needles = 1 if form == "single" else 3
    if haystack == "decoys" and documents is DECOYS:
        sample = prompts[index]
        assert sample.value == "1234567"
        assert len(sample.input_ids) == length
        text = tok.decode(sample.input_ids[: sample.value_span[1]])
        assert squeeze(text).rstrip(".").endswith(squeeze(f"{NEEDLE}{sample.key} is: 1234567")), text[-90:]
        return
    check(tok, prompts[index], length, needles=needles)


@pytest.mark.parametrize("name", NAMES)
def test_additive_only_where_line_ends_split_tokens(name):
    prompts = niah.build(make(name), length=512, n=2, seed=3, haystack="essay", documents=PROSE, values="numbers")
    assert prompts.additive == (name in ADDITIVE)


def test_both_ways_give_the_same_prompt():
    """Encoding the whole text is the reference for putting ids together from lines."""
    fast = niah.build(make("merged"), length=700, n=20, seed=5, haystack="essay", documents=PROSE)
    slow = niah.build(make("merged"), length=700, n=20, seed=5, haystack="essay", documents=PROSE)
    object.__setattr__(slow._composer._haystack, "additive", False)
    for a, b in zip(fast, slow, strict=True):
        assert a.input_ids.tolist() == b.input_ids.tolist()
        assert (a.value_span, a.key_span, a.answer_span) == (b.value_span, b.key_span, b.answer_span)
        assert a.answer_digits == b.answer_digits


def test_offsets_rebuilt_by_decoding_equal_true_ones():
    true = niah.build(make("merged"), length=600, n=10, seed=1, haystack="essay", documents=EMOJI)
    for cls in (ZeroWidth, NoOffsets):
        rebuilt = niah.build(cls(_raw("merged")), length=600, n=10, seed=1, haystack="essay", documents=EMOJI)
        for a, b in zip(true, rebuilt, strict=True):
            assert (a.value_span, a.key_span, a.answer_span) == (b.value_span, b.key_span, b.answer_span)


def test_bos_policy():
    for name in ("bos", "auto bos"):
        tok = make(name)
        ids = niah.build(tok, length=300, n=1, seed=0)[0].input_ids
        assert np.flatnonzero(ids == 0).tolist() == [0]
        bare = niah.build(tok, length=300, n=1, seed=0, bos=False)[0]
        assert 0 not in bare.input_ids
        assert bare.value in tok.decode(bare.input_ids[slice(*bare.value_span)])
    with pytest.raises(ValueError, match="bos_id is None"):
        niah.build(make("digits"), length=300, n=1, seed=0, bos=True)
    with pytest.raises(ValueError, match="encodes to the BOS id 0"):
        niah.build(make("bos"), length=300, n=1, seed=0, haystack="essay", documents=["A line.", "A <s> tag."])


def test_sample_depends_on_seed_and_index_only():
    common = {"length": 400, "haystack": "noise", "values": "numbers"}
    few = niah.build(make("digits"), n=6, seed=9, **common)
    many = niah.build(make("digits"), n=10**6, seed=9, **common)
    np.random.seed(3)  # noqa: NPY002 - the global generator must not matter
    for i, sample in enumerate(few):
        assert sample.index == i
        assert sample.input_ids.tolist() == many[i].input_ids.tolist()
        assert (sample.key, sample.value, sample.depth) == (many[i].key, many[i].value, many[i].depth)
    assert few[-1].input_ids.tolist() == few[5].input_ids.tolist()
    assert [s.index for s in few[1:6:2]] == [1, 3, 5]
    other = niah.build(make("digits"), n=6, seed=10, **common)
    assert all(a.value != b.value for a, b in zip(few, other, strict=True))
    assert len({s.value for s in many[:50]}) == 50
    grid = niah.build(make("digits"), n=6, seed=9, depth=[0.5], **common)
    assert [s.key for s in grid] == [s.key for s in few]
    with pytest.raises(IndexError):
        few[6]


def test_prompts_are_built_when_asked_for():
    tok = make("digits")
    prompts = niah.build(tok, length=500, n=10**9, seed=0)
    assert len(prompts) == 10**9
    tok.characters = 0
    stream = iter(prompts)
    assert tok.characters == 0
    next(stream)
    first = tok.characters
    assert 0 < first < 20 * 500 * 4
    next(stream)
    assert tok.characters - first < 4000  # nothing but the new needle, its neighbours and the question
    assert prompts[10**9 - 1].index == 10**9 - 1


@pytest.mark.parametrize("length", [64, 128, 256, 1024])
@pytest.mark.parametrize("name", ["digits", "across lines"])
def test_short_lengths_end_or_are_refused(name, length):
    try:
        prompts = niah.build(make(name), length=length, n=40, seed=0)
    except ValueError as error:
        assert "too short" in str(error)  # noqa: PT017
        least = int(str(error).rsplit(" ", 1)[1])
        assert length < least < 320
        prompts, length = niah.build(make(name), length=least, n=40, seed=0), least
    assert {len(sample.input_ids) for sample in prompts} == {length}


def test_128k_tokens():
    tok = make("digits")
    sample = niah.build(tok, length=131_072, n=1, seed=0, haystack="essay", depth=0.37)[0]
    assert len(sample.input_ids) == 131_072
    assert abs(sample.depth - 0.37) < 2e-3
    assert tok.decode(sample.input_ids[slice(*sample.value_span)]) == sample.value


def test_depth_is_where_the_needle_is():
    grid = [0.0, 0.25, 0.5, 0.75, 1.0]
    prompts = niah.build(make("digits"), length=2500, n=10, seed=0, depth=grid, values="numbers")
    for i, sample in enumerate(prompts):
        assert sample.depth_requested == grid[i % 5]
        assert abs(sample.depth - sample.depth_requested) < 0.07
    tok = make("digits")
    front, back = tok.decode(prompts[0].input_ids), tok.decode(prompts[4].input_ids)
    assert front.split("\n")[1].startswith(NEEDLE)
    assert back.split("\n")[-2].startswith(NEEDLE)
    uniform = [s.depth_requested for s in niah.build(tok, length=250, n=300, seed=0)]
    assert np.histogram(uniform, 4, (0, 1))[0].min() > 50
    assert {s.depth_requested for s in niah.build(tok, length=250, n=3, seed=0, depth=1)} == {1.0}


def test_classes_and_depths_are_crossed():
    prompts = niah.build(
        make("digits"), length=250, n=48, seed=0, values="hard", after_shared=True, depth=[0.1, 0.9, 0.5]
    )
    cells = Counter((s.label, s.depth_requested) for s in prompts)
    assert len(cells) == 24
    assert set(cells.values()) == {2}
    assert all(s.value == niah.HARD[s.label] for s in prompts)
    assert niah.build(make("digits"), length=250, n=1, seed=0, values="numbers")[0].label == -1
    default = niah.build(make("digits"), length=250, n=16, seed=0)
    assert [s.value for s in default] == [*niah.EASY, *niah.EASY], "the easy classes, in turn"


def test_forms():
    tok = make("digits")
    kwargs = {"length": 900, "n": 8, "seed": 2, "distractors": 3}
    for sample in niah.build(tok, form="multi_key", values="easy", **kwargs):
        assert len(sample.values) == 1
        assert len(sample.distractors) == 3
        assert len({sample.key, *(k for k, _ in sample.distractors)}) == 4
        assert not {v for _, v in sample.distractors} & set(niah.EASY)
        text = tok.decode(sample.input_ids)
        assert all(f"for {k} is: {v}." in text for k, v in sample.distractors)
        assert f"for {sample.key} is: {sample.value}." in text
    for sample in niah.build(tok, form="multi_value", **kwargs):
        assert len(set(sample.values)) == 4
        assert sample.value in sample.values
        assert list(sample.value_spans) == sorted(sample.value_spans)
        text = tok.decode(sample.input_ids)
        assert text.endswith(", ".join(sample.values))
        assert text.count(f"for {sample.key} is: ") == 4
        answer = tok.decode(sample.input_ids[slice(*sample.answer_span)])
        assert answer == ", ".join(sample.values)
        assert sum(sample.answer_digits) == 28
        assert sample.answer_digits.count(0) > 0
    for sample in niah.build(tok, form="multi_query", **kwargs):
        assert sample.values[0] == sample.value
        assert sample.value_spans[0] == sample.value_span
        question = tok.decode(sample.input_ids).split("\n")[-1]
        assert sample.key in question
        assert " and " in question


@pytest.mark.parametrize("keys", ["numbers", "uuids", ["alpha", "beta", "gamma"]])
def test_other_keys(keys):
    tok = make("digits")
    for sample in niah.build(tok, length=400, n=5, seed=0, keys=keys):
        check(tok, sample, 400)


REFUSALS = [
    ({"length": 20}, "length 20 is too short.*at least"),
    ({"length": 400.0}, "length is 400.0; expected an integer"),
    ({"n": -1}, "n is -1"),
    ({"seed": -1}, "seed is -1"),
    ({"haystack": "novel"}, "haystack is 'novel'; expected one of repeat, essay, noise"),
    ({"documents": ["x"]}, "documents were given with haystack 'repeat'"),
    ({"documents": "one text", "haystack": "essay"}, "documents is one string"),
    ({"documents": ["  \n "], "haystack": "essay"}, "hold no text"),
    ({"depth": "deep"}, "depth is 'deep'"),
    ({"depth": [0.5, 1.5]}, "depth is .*1.5"),
    ({"depth": []}, "depth is"),
    ({"keys": "names"}, "keys is 'names'"),
    ({"keys": []}, "keys are empty"),
    ({"keys": ["a"], "form": "multi_key"}, "fewer than 4 different"),
    ({"values": "odd"}, "values is 'odd'"),
    ({"values": []}, "values are empty"),
    ({"values": ["7", "7"]}, "expected different"),
    ({"values": [" 7"]}, "without outer spaces"),
    ({"form": "double"}, "form is 'double'; expected one of single"),
    ({"verify": -1}, "verify is -1"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSALS, ids=lambda x: x if isinstance(x, str) else None)
def test_refusals(bad, message):
    good = {"length": 400, "n": 2, "seed": 0}
    assert len(niah.build(make("digits"), **good)) == 2
    with pytest.raises(ValueError, match=message):
        niah.build(make("digits"), **(good | bad))


def test_values_the_tokenizer_cannot_spell_are_refused():
    with pytest.raises(ValueError, match="decode to '<unk>'"):
        niah.build(make("words"), length=300, n=1, seed=0, values=["zyxwv"])
    with pytest.raises(ValueError, match="add no special tokens at the end"):
        niah.build(AddsEos(_raw("digits")), length=300, n=1, seed=0)[0]


def test_lengths_out_of_reach_are_refused():
    """A tokenizer of two ids a character never reaches an odd length."""

    class Doubled:
        bos_id, vocab_size = None, 2048

        def encode(self, text):
            return [x for c in text for x in (ord(c), 1024)]

        def decode(self, ids):
            return "".join(chr(i) for i in ids if i != 1024)

        def encode_with_offsets(self, text):
            return self.encode(text), [(i, i + 1) for i in range(len(text)) for _ in (0, 1)]

    assert len(niah.build(Doubled(), length=1000, n=1, seed=0)[0].input_ids) == 1000
    with pytest.raises(ValueError, match="length 1001 cannot be reached exactly"):
        niah.build(Doubled(), length=1001, n=1, seed=0)[0]


def test_tokens_that_look_beyond_a_line_are_found():
    """Verification of whole texts catches what no check of neighbouring lines can see; verify=1 mends it."""

    class Parity(Tok):  # the last token depends on the length of the whole text
        def encode(self, text):
            ids = super().encode(text)
            return [*ids[:-1], self.vocab_size + ids[-1]] if len(text) > 2000 else ids

        def encode_with_offsets(self, text):
            return self.encode(text), super().encode_with_offsets(text)[1]

        def decode(self, ids):
            return super().decode([i % self.vocab_size for i in ids])

    with pytest.raises(ValueError, match="looks further than a line; pass verify=1"):
        niah.build(Parity(_raw("digits")), length=1500, n=1, seed=0)[0]
    sample = niah.build(Parity(_raw("digits")), length=1500, n=1, seed=0, verify=1)[0]
    assert sample.input_ids[-1] >= _raw("digits").get_vocab_size()
    assert len(sample.input_ids) == 1500


def test_accuracy_of_planted_answers():
    for name, least, most in (("digits", 7, 7), ("bos", 3, 6)):  # one digit a token; up to three
        sample = niah.build(make(name), length=300, n=1, seed=0)[0]
        start, end = sample.answer_span
        assert least <= end - start <= most
        answer = sample.input_ids[start:end].copy()
        assert niah.accuracy(answer, sample) == (True, 1.0)
        answer[0] += 1
        assert niah.accuracy(answer, sample) == (False, pytest.approx(1 - sample.answer_digits[0] / 7))
        everywhere = np.full(300, -5)
        everywhere[start - 1 : end - 1] = sample.input_ids[start:end]
        assert niah.accuracy(everywhere, sample) == (True, 1.0)
        assert niah.accuracy(sample.input_ids, sample).all_correct is False  # not shifted: predicts itself
        with pytest.raises(ValueError, match="expected integer ids of shape"):
            niah.accuracy(answer[:-1], sample)
        with pytest.raises(ValueError, match="dtype float64"):
            niah.accuracy(answer.astype(float), sample)
    multi = niah.build(make("digits"), length=500, n=1, seed=0, form="multi_value", distractors=1)[0]
    answer = multi.input_ids[slice(*multi.answer_span)].copy()
    answer[np.asarray(multi.answer_digits) == 0] = -1  # the comma between two values is not scored
    assert niah.accuracy(answer, multi) == (True, 1.0)


PROBED = [
    (name, values, after_shared)
    for values, after_shared in (("easy", False), ("hard", True))
    for name in NAMES
    if name not in REFUSED[values]
]


def test_next_token_tells_classes_apart():
    assert niah.next_token_distinct(make("digits"), niah.EASY)
    assert not niah.next_token_distinct(make("digits"), niah.HARD)
    assert niah.shared_answer_tokens(make("digits"), niah.HARD) == 7
    assert niah.shared_answer_tokens(make("digits"), niah.EASY) == 0
    assert niah.shared_answer_tokens(make("auto bos"), niah.HARD) == 2  # 314|159|20 .. 314|159|27
    assert not niah.next_token_distinct(make("digits"), ["12", "13", "21"])
    assert niah.shared_answer_tokens(make("digits"), ["12", "13", "21"]) == 0


@pytest.mark.parametrize("form", ["single", "multi_key", "multi_value", "multi_query"])
@pytest.mark.parametrize(("name", "values", "after_shared"), PROBED)
def test_the_next_token_after_the_probed_one_is_the_class(name, values, after_shared, form):
    """Of prompts that differ in the value alone: at `probe` they agree, one token later no two of them do."""
    tok = make(name)
    prompts = niah.build(
        tok, length=500, n=8, seed=1, values=values, after_shared=after_shared, keys=["amber"], depth=0.5, form=form,
        distractors=0,
    )  # fmt: skip
    found = list(prompts)
    assert [s.label for s in found] == list(range(8))
    given = niah.given_tokens(tok, niah.VALUE_SETS[values], after_shared)
    assert {s.probe - s.answer_span[0] + 1 for s in found} == {given}
    assert len({tuple(s.input_ids[s.answer_span[0] - 1 : s.probe + 1].tolist()) for s in found}) == 1
    following = [tok.decode([s.input_ids[s.probe + 1]]) for s in found]
    assert len(set(following)) == 8


def test_the_probed_value_is_the_first_needles_wherever_it_is_asked_for():
    """multi_value asks in the order of the text, so the class may stand behind other answers."""
    tok = make("digits")
    places = set()
    for sample in niah.build(tok, length=900, n=24, seed=2, form="multi_value", distractors=2):
        place = sample.values.index(sample.value)
        places.add(place)
        assert sample.probe == sample.answer_spans[place][0] - 1
        assert tok.decode(sample.input_ids[sample.probe + 1 : sample.probe + 8]) == sample.value
    assert places == {0, 1, 2}


def test_class_sets_that_go_on_alike_are_refused_with_remedies():
    """At the last prompt token the next one is 3 whatever the hard class is."""
    with pytest.raises(niah.ClassSetError, match=r"8 values 31415920 .* 1 different token.*7 tokens that all") as hard:
        niah.build(make("digits"), length=300, n=1, seed=0, values="hard")
    assert "(after_shared=True), or use values='easy'" in str(hard.value)
    assert hard.value.shared == 7
    with pytest.raises(niah.ClassSetError, match=r"3 values 12 \.\.\. 34 go on with 2 different token.*values='easy'"):
        niah.build(make("digits"), length=300, n=1, seed=0, values=["12", "13", "34"], after_shared=True)
    assert len(niah.build(make("digits"), length=300, n=1, seed=0, values="numbers")) == 1, "no classes, no refusal"


@pytest.mark.parametrize("name", NAMES)
def test_class_sets_are_refused_where_the_tokenizer_hides_or_tells_the_class(name):
    tok = make(name)
    for values, names in REFUSED.items():
        if name in names:
            with pytest.raises(niah.ClassSetError, match="under this tokenizer"):
                niah.build(tok, length=400, n=1, seed=0, values=values, after_shared=True)
        else:
            assert len(niah.build(tok, length=400, n=1, seed=0, values=values, after_shared=True)) == 1
    if name == "metaspace":
        with pytest.raises(
            niah.ClassSetError, match=r"before the answer .* \('is' before 1234567, 's ' before 2345678\)"
        ):
            niah.build(tok, length=400, n=1, seed=0)


def test_essays_may_be_paths(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße. " * 30, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfa")
    kwargs = {"length": 400, "n": 2, "seed": 0, "haystack": "essay"}
    read = niah.build(make("digits"), documents=[tmp_path / "a.txt"], **kwargs)
    given = niah.build(make("digits"), documents=["Grüße. " * 30], **kwargs)
    assert [s.input_ids.tolist() for s in read] == [s.input_ids.tolist() for s in given]
    assert read.metadata()["documents"] == ["document 0, a.txt"]
    for name in ("b.txt", "none.txt"):
        with pytest.raises(ValueError, match=rf"{name}: no readable text file.*expected UTF-8 text"):
            niah.build(make("digits"), documents={"x": tmp_path / name}, **kwargs)


def test_where_a_prompt_is_probed_does_not_change_it():
    hard = [
        niah.build(make("auto bos"), length=400, n=9, seed=0, values=[*niah.EASY], after_shared=after)
        for after in (False, True)
    ]
    assert hard[0].metadata()["hash"] == hard[1].metadata()["hash"]
    assert [s.input_ids.tolist() for s in hard[0]] == [s.input_ids.tolist() for s in hard[1]]
    assert [m.metadata()["after_shared"] for m in hard] == [False, True]


def test_metadata_names_all_that_a_stream_depends_on():
    def hashed(**change):
        kwargs = {"length": 400, "n": 3, "seed": 0, "haystack": "essay", "documents": {"a": "One. Two.", "b": "Three."}}
        return niah.build(make("digits"), **(kwargs | change)).metadata()

    base = hashed()
    assert json.loads(json.dumps(base)) == base
    assert base["documents"] == ["a", "b"]
    assert base["haystack_lines"] == 3
    assert hashed(n=50)["hash"] == base["hash"]
    template = niah.Template(announce="Find the number.")
    changes = [{"seed": 1}, {"length": 401}, {"template": template}, {"documents": {"a": "One. Two.", "b": "Four."}}]
    assert len({base["hash"], *(hashed(**change)["hash"] for change in changes)}) == 5
    assert hashed(template=template)["template_sha256"] != base["template_sha256"]
    assert niah.build(make("merged"), length=400, n=1, seed=0).metadata()["tokenizer_probe"] != base["tokenizer_probe"]


@pytest.mark.parametrize(
    "bad", [{"needle": "no slots"}, {"question": "{key} {value}?"}, {"announce": "two\nlines"}, {"question": "{value}"}]
)
def test_templates_are_checked(bad):
    with pytest.raises(ValueError, match=r"Template\."):
        niah.Template(**bad)


def test_template_with_value_before_key():
    tok = make("digits")
    template = niah.Template(needle="{value} is the number of {key}, they say.")
    sample = niah.build(tok, length=300, n=1, seed=0, template=template)[0]
    assert tok.decode(sample.input_ids[slice(*sample.key_span)]).strip() == sample.key
    assert tok.decode(sample.input_ids[slice(*sample.value_span)]) == sample.value


def test_word_lists():
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) >= 100
        assert not set(words) & set(PLAIN)
    assert not set(ADJECTIVES) & set(NOUNS)


def test_documents_become_short_lines_and_lose_nothing():
    text = "First one. Second, " + "and more; " * 60 + "end.\n\n  indented\ttext 東京。京都。 " + "x" * 700
    lines = split_lines(text)
    assert squeeze("".join(lines)) == squeeze(text)
    assert max(map(len, lines)) <= 240
    assert all(line == line.strip() and line for line in lines)
    assert lines[0] == "First one."
    assert "東京。" in "\n".join(lines).split("\n")[-6:][0] or any(line.endswith("東京。") for line in lines)


# --------------------------------------------------------------------------------------- tokens that cross line ends

SPANS = ("value_spans", "answer_spans", "key_span", "answer_digits", "probe", "depth", "distractors")


@cache
def _glued(kind):
    """Tokenizers that have learnt what stands round the line ends of all three haystacks."""
    rng = np.random.default_rng(0)
    sentences = [*PROSE, *REPEATED * 40, *vars(niah.Template()).values(), "{} , and - \" ; '"]
    keys = [f"{a}-{b}" for a, b in zip(ADJECTIVES, NOUNS, strict=False)]
    lines = [
        *keys,
        *ADJECTIVES,
        *NOUNS,
        *PLAIN,
        *sentences,
        *(" ".join(rng.choice(PLAIN, 3)) + "." for _ in range(1500)),
    ]
    texts = ["\n".join(rng.permutation(lines)) for _ in range(2)] + [f"is: {i * 99991 % 10**7}." for i in range(300)]
    raw = Tokenizer(models.Unigram() if kind == "glued unigram" else models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    options = {"vocab_size": 2500, "special_tokens": ["<unk>", "<s>"], "show_progress": False}
    unigram = trainers.UnigramTrainer(unk_token="<unk>", **options)
    raw.train_from_iterator(texts, unigram if kind == "glued unigram" else trainers.BpeTrainer(**options))
    return raw


def encoded_whole(monkeypatch, *args, **kwargs):
    """The same prompts by the direct way: every text encoded at once."""
    with monkeypatch.context() as patch:
        patch.setattr(Crossing, "_splice", lambda *_: None)
        return list(niah.build(*args, **kwargs))


@pytest.mark.parametrize("haystack", ["repeat", "essay", "noise"])
@pytest.mark.parametrize("name", ["across lines", "glued unigram", "glued words"])
def test_spliced_prompts_are_those_of_whole_texts(monkeypatch, name, haystack):
    tok = Tok(_glued(name)) if name.startswith("glued") else make(name)
    form, seed = {"repeat": ("multi_value", 1), "essay": ("multi_key", 2), "noise": ("single", 3)}[haystack]
    kwargs = {
        "length": 1500, "n": 3, "seed": seed, "haystack": haystack, "form": form, "values": "numbers", "verify": 0,
        "documents": PROSE[:60] if haystack == "essay" else None,
    }  # fmt: skip
    spliced = []
    splice = Crossing._splice
    monkeypatch.setattr(Crossing, "_splice", lambda *args: spliced.append(splice(*args)) or spliced[-1])
    prompts = niah.build(tok, **kwargs)
    assert not prompts.additive or not name.startswith("glued")
    monkeypatch.setattr(Haystack, "additive", property(lambda _: False, lambda *_: None), raising=False)
    samples = list(prompts)
    assert None not in spliced
    assert len(spliced) >= 3
    for ours, direct in zip(samples, encoded_whole(monkeypatch, tok, **kwargs), strict=True):
        assert ours.input_ids.tolist() == direct.input_ids.tolist()
        assert [getattr(ours, span) for span in SPANS] == [getattr(direct, span) for span in SPANS]
        check(tok, ours, 1500, needles=1 if form == "single" else 4)


def test_splicing_encodes_little():
    tok = Tok(_glued("glued words"))
    prompts = niah.build(tok, length=8000, n=3, seed=0, haystack="essay", documents=PROSE, verify=0)
    text = tok.decode(prompts[0].input_ids)
    tok.characters = 0
    assert len(prompts[1].input_ids) == 8000
    assert tok.characters < len(text) / 2


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["across lines", "metaspace", "merged"]),
    text=st.text(st.sampled_from(" .\nabehiorst19é🙂"), max_size=60),
    at=st.tuples(st.integers(200, 1500), st.integers(200, 1500)),
)
def test_a_weld_is_the_encoding_of_the_whole(name, text, at):
    encoder, hay = Encoder(make(name)), "\n".join(PROSE[:40])
    left, right = run_of(encoder, hay), run_of(encoder, hay[::-1])
    seam = weld(encoder, Side(left, at[0], 0, len(left.ids)), text, Side(right, at[1], 0, len(right.ids)))
    assert seam is not None
    ids = [*left.ids[: seam.keep].tolist(), *seam.ids, *right.ids[seam.skip :].tolist()]
    assert ids == encoder.encode(hay[: at[0]] + text + hay[::-1][at[1] :])


def test_texts_that_never_agree_are_encoded_whole(monkeypatch):
    class Marked(Tok):  # every token says how long the text is: no window agrees with anything
        def encode(self, text):
            return [i + self.vocab_size * len(text) for i in super().encode(text)]

        def encode_with_offsets(self, text):
            return self.encode(text), super().encode_with_offsets(text)[1]

        def decode(self, ids):
            return super().decode([int(i) % self.vocab_size for i in ids])

    kwargs = {"length": 700, "n": 3, "seed": 0, "haystack": "essay", "documents": PROSE[:40], "values": "numbers"}
    ours = list(niah.build(Marked(_raw("across lines")), **kwargs))
    assert [len(s.input_ids) for s in ours] == [700] * 3
    for sample, direct in zip(ours, encoded_whole(monkeypatch, Marked(_raw("across lines")), **kwargs), strict=True):
        assert sample.input_ids.tolist() == direct.input_ids.tolist()
        assert sample.value_spans == direct.value_spans
        assert len(set((sample.input_ids // _raw("across lines").get_vocab_size()).tolist())) == 1


def test_tokens_that_look_beyond_a_window_are_found():
    class Parity(Tok):  # the last token depends on the length of the whole text
        def encode(self, text):
            ids = super().encode(text)
            return [*ids[:-1], self.vocab_size + ids[-1]] if len(text) > 1800 else ids

        def encode_with_offsets(self, text):
            return self.encode(text), super().encode_with_offsets(text)[1]

        def decode(self, ids):
            return super().decode([int(i) % self.vocab_size for i in ids])

    kwargs = {"length": 1500, "n": 1, "seed": 0, "haystack": "essay", "documents": PROSE, "values": "numbers"}
    with pytest.raises(ValueError, match="spliced from known stretches differ from encode.*pass verify=1"):
        niah.build(Parity(_raw("across lines")), **kwargs)[0]
    sample = niah.build(Parity(_raw("across lines")), verify=1, **kwargs)[0]
    assert len(sample.input_ids) == 1500
    assert sample.input_ids[-1] >= _raw("across lines").get_vocab_size()


# ---------------------------------------------------------------------------------------------------- training streams


def stream(tok, n, text=None):
    ids = tok.encode(text or "\n".join(PROSE))
    return np.asarray((ids * (n // len(ids) + 1))[:n], np.uint16)


@pytest.mark.parametrize("name", NAMES)
def test_insert_keeps_length_spans_and_the_stream(name):
    tok = make(name)
    rng = np.random.default_rng(0)
    hay = stream(tok, 900)
    for depth in [None, 0.0, 0.01, 0.5, 1.0, *np.linspace(0.02, 0.9, 9)]:
        sample = niah.insert(hay, tok, rng, 600, depth=depth)
        ids = sample.input_ids.tolist()
        assert len(ids) == 600
        assert sample.input_ids.dtype == np.int32
        if tok.bos_id is not None and name != "auto bos":
            assert ids.index(tok.bos_id) == 0
        text = squeeze(tok.decode(ids))
        assert text.count(squeeze(f"{NEEDLE}{sample.key} is: {sample.value}.")) == 1
        assert text.endswith(squeeze(f"for {sample.key} given in the text is {sample.value}"))
        _tight(tok, ids, sample.value_span, sample.value)
        _tight(tok, ids, sample.answer_span, sample.value)
        assert squeeze(sample.key) in squeeze(tok.decode(ids[slice(*sample.key_span)]))
        assert sample.answer_span[1] == 600
        assert sample.probe == sample.answer_span[0] - 1
        assert niah.accuracy(ids[slice(*sample.answer_span)], sample) == (True, 1.0)
        assert abs(sample.depth - sample.depth_requested) < 0.3
        assert _longest_common(ids, hay[:600].tolist()) > 150


def _longest_common(ids, hay):
    """Length of the longest run of `hay` found unchanged in `ids` (coarse: runs of 50, extended)."""
    best = 0
    for start in range(0, len(hay) - 50, 10):
        for at in range(len(ids) - 50):
            if ids[at] == hay[start] and ids[at : at + 50] == hay[start : start + 50]:
                n = 50
                while at + n < len(ids) and start + n < len(hay) and ids[at + n] == hay[start + n]:
                    n += 1
                best = max(best, n)
                break
        if best > 150:
            return best
    return best


def test_insert_stands_on_its_own_line_and_parts_no_character():
    tok = make("digits")
    rng = np.random.default_rng(1)
    hay = stream(tok, 500, text="🙂👩‍👩‍👧東京é" * 40)
    for depth in np.linspace(0, 1, 33):
        text = tok.decode(niah.insert(hay, tok, rng, 400, depth=float(depth)).input_ids)
        lines = text.split("\n")
        assert len([line for line in lines if line.startswith(NEEDLE)]) == 1
        assert lines[-1].startswith("What is the special")
        at = next(i for i, line in enumerate(lines) if line.startswith(NEEDLE))
        neighbours = [*(lines[at - 1 : at] if at > 1 else []), *(lines[at + 1 : at + 2] if at < len(lines) - 2 else [])]
        for line in neighbours:
            inner = line[-1:] if line is lines[at - 1] else line[:1]
            assert inner != "\ufffd"


def test_insert_by_digits_equals_encoding_the_sentence():
    tok = make("digits")
    inserter = niah.Inserter(tok)
    assert inserter._digit_ids is not None
    assert niah.Inserter(make("merged"))._digit_ids is None
    rng = np.random.default_rng(2)
    hay = stream(tok, 400)
    for value in ["0000000", "9876543", "1000001", "31415926", "5"] * 2:
        sample = inserter(hay, rng, 400, key="amber-falcon", value=value)
        needle = tok.encode(f"\n{NEEDLE}amber-falcon is: {value}.\n")[1:]
        question = tok.encode(
            "\nWhat is the special magic number for amber-falcon given in the text? The special magic number for "
            f"amber-falcon given in the text is {value}"
        )[1:]
        ids = sample.input_ids.tolist()
        assert ids[-len(question) :] == question
        assert any(ids[i : i + len(needle)] == needle for i in range(len(ids)))


def test_insert_draws_from_the_generator_only():
    tok = make("digits")
    hay = stream(tok, 500)
    a, b = (niah.insert(hay, tok, np.random.default_rng(7), 500) for _ in range(2))
    assert a.input_ids.tolist() == b.input_ids.tolist()
    rng = np.random.default_rng(7)
    samples = [niah.insert(hay, tok, rng, 500) for _ in range(40)]
    assert len({s.value for s in samples}) == 40
    assert len({s.key for s in samples}) > 30
    other = niah.Template(announce="Look out for a number.")
    assert tok.decode(niah.insert(hay, tok, rng, 500, template=other).input_ids).startswith("Look out")
    assert tok.decode(niah.insert(hay, tok, rng, 500).input_ids).startswith("A special magic")
    separated = hay.copy()
    separated[200] = 0
    assert 0 in niah.insert(separated, tok, rng, 500, depth=0.9).input_ids


@pytest.mark.parametrize(
    ("given", "length", "depth"), [(100, 400, None), (400, 60, None), (400, 400, 1.2), (400, 400, -0.1)]
)
def test_insert_refuses(given, length, depth):
    tok = make("digits")
    with pytest.raises(ValueError, match="cannot insert a needle: length"):
        niah.insert(stream(tok, given), tok, np.random.default_rng(0), length, depth=depth)
