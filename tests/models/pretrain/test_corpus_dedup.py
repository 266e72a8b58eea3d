"""N-grams, duplicates, and the removal of evaluation text."""

import hashlib
import random
import re

import numpy as np
import pytest

from models.pretrain import corpus_dedup
from models.pretrain.corpus_sources import Document

N = 5
OPTIONS = {"n": N, "boilerplate_documents": 3, "fraction": 0.5}


def text_of(seed, count=60):
    rng = random.Random(seed)
    return " ".join("".join(rng.choice("abcdefgh") for _ in range(6)) for _ in range(count))


def naive_ngrams(text, n):
    """The n-gram hashes from the definition, in Python integers."""
    words = [word for word in re.findall(r"\w+", text.lower(), re.ASCII) if not word[0].isdigit()]
    values = [int.from_bytes(hashlib.blake2b(w.encode(), digest_size=8).digest(), "little") for w in words]
    power = int(corpus_dedup.MULTIPLIER)
    spans = range(len(values) - n + 1)
    return [sum(values[t + i] * power ** (n - 1 - i) for i in range(n)) % 2**64 for t in spans]


@pytest.mark.parametrize("n", [1, 4, 13])
def test_ngram_hashes_follow_their_definition(n):
    text = (
        "Static int foo_bar(0x1F, 12, x9) = {3.5e4};\n\treturn Foo + _baz * 'tail' if more and more words follow here"
    )
    assert corpus_dedup.ngram_hashes(text, n, corpus_dedup.WordHashes()).tolist() == naive_ngrams(text, n)
    assert len(corpus_dedup.ngram_hashes("too few", 4, corpus_dedup.WordHashes())) == 0


def test_numbers_punctuation_case_and_space_do_not_count():
    words = corpus_dedup.WordHashes()
    a = corpus_dedup.ngram_hashes("The quick, BROWN fox\n 12 jumps!", N, words)
    b = corpus_dedup.ngram_hashes("the-quick brown (fox) jumps 77", N, words)
    assert len(a) == 1
    assert a.tolist() == b.tolist()
    assert len(corpus_dedup.ngram_hashes("0x00, 0x01, 12, 13, 0.5, 1e9 " * 20, N, words)) == 0


def test_exact_duplicates_keep_the_first():
    documents = [Document("a", "1", "same text"), Document("a", "2", "other"), Document("b", "3", "same text\n")]
    kept, removed = corpus_dedup.without_exact_duplicates(documents)
    assert [d.name for d in kept] == ["1", "2"]
    assert [d.name for d in removed] == ["3"]


def test_evaluation_text_removes_documents_that_share_one_ngram_and_no_other():
    evaluation = text_of(0, 400)
    words = evaluation.split()
    shares = Document("a", "shares", text_of(1) + " " + " ".join(words[100 : 100 + N]) + " " + text_of(2))
    almost = Document("a", "almost", text_of(3) + " " + " ".join(words[200 : 200 + N - 1]) + " " + text_of(4))
    clean = Document("a", "clean", text_of(5))
    result = corpus_dedup.without_evaluation_and_near_duplicates(
        [shares, almost, clean], [text_of(6), evaluation], **OPTIONS
    )
    kept, shared, near, boilerplate = result
    assert [d.name for d in shared] == ["shares"]
    assert [d.name for d in kept] == ["almost", "clean"]
    assert not near
    assert boilerplate == 0


@pytest.mark.parametrize("copies", [3, 4])
def test_boilerplate_in_more_documents_than_the_limit_does_not_count(copies):
    licence = text_of(0, N)  # one n-gram
    documents = [Document("a", str(i), f"{licence} {text_of(10 + i)}") for i in range(copies)]
    documents.append(Document("a", "real", " ".join(text_of(1, 50).split()[10 : 10 + N]) + " " + text_of(99)))
    evaluation = [licence + " 1 " + text_of(1, 50)]
    kept, shared, _, boilerplate = corpus_dedup.without_evaluation_and_near_duplicates(documents, evaluation, **OPTIONS)
    expected = [] if copies > OPTIONS["boilerplate_documents"] else [str(i) for i in range(copies)]
    assert [d.name for d in shared] == [*expected, "real"]
    assert boilerplate == int(not expected)
    assert len(kept) + len(shared) == len(documents)


def test_near_duplicates_are_removed_and_half_new_documents_stay():
    first = text_of(0, 2000).split()
    documents = [
        Document("a", "first", " ".join(first)),
        Document("a", "near", " ".join(first[:1800] + text_of(1, 200).split())),
        Document("a", "quarter", " ".join(first[:500] + text_of(2, 1500).split())),
        Document("a", "new", text_of(3, 2000)),
    ]
    kept, shared, near, _ = corpus_dedup.without_evaluation_and_near_duplicates(documents, [], **OPTIONS)
    assert [d.name for d in near] == ["near"]
    assert [d.name for d in kept] == ["first", "quarter", "new"]
    assert not shared


def test_hits_are_the_shared_values():
    targets = np.array([2, 5, 9, 11], np.uint64)
    found = corpus_dedup.hits(np.array([11, 1, 5, 5, 12], np.uint64), targets)
    assert found.tolist() == [1, 3]
    assert len(corpus_dedup.hits(np.array([1], np.uint64), targets[:0])) == 0
