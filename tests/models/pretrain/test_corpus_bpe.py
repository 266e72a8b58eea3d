"""The tokenizer: identity of two trainings, single digits, exact round trip, the separator."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.pretrain import corpus_bpe, corpus_sample
from models.pretrain.corpus_sources import CorpusError, Document

HARD = [
    "", " ", "\n\n\t\t  x", "tabs\tand\r\nreturns", "emoji 👩‍👩‍👧 🏳️‍🌈 é ñ 日本語 \u202e", "\x00\x01\x7f\ufeff\uffff",
    "  leading, trailing  ", "x=1234567890.5e-10; ²³ ½ ٣٤", "a<|endoftext|>b", "don't you'll   \n", "\U0010ffff",
]  # fmt: skip


def texts():
    rng = random.Random(3)
    code = [corpus_sample.code(rng, 40) for _ in range(40)]
    return code + [corpus_sample.prose(rng, 60) for _ in range(40)] + ["year 1984 and 2024, 1984, 1984\n" * 50]


@pytest.fixture(scope="module")
def tokenizer():
    return corpus_bpe.train_tokenizer(iter(texts()), 431)


def test_training_twice_gives_the_same_bytes(tokenizer):
    assert corpus_bpe.train_tokenizer(iter(texts()), 431).to_str() == tokenizer.to_str()
    reverse = corpus_bpe.train_tokenizer(iter(reversed(texts())), 431)
    assert reverse.to_str() == tokenizer.to_str()  # counts decide, not the order of texts


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_round_trip(tokenizer, text):
    reloaded = Tokenizer.from_str(tokenizer.to_str())
    assert reloaded.decode(reloaded.encode(text).ids, skip_special_tokens=False) == text


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert not [token for token in vocabulary if sum(c.isdigit() for c in token) > 1]
    assert not [token for token in vocabulary if any(c.isdigit() for c in token) and len(token) > 1]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("1984").ids] == list("1984")
    assert len(tokenizer.encode("x 31415").ids) - len(tokenizer.encode("x ").ids) == 5


def test_end_of_text_is_zero_and_never_comes_from_text(tokenizer):
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.get_vocab_size() == 431
    assert tokenizer.encode("no text makes it").ids.count(0) == 0  # no BOS or EOS is added
    documents = [Document("a", "1", "a<|endoftext|>b"), Document("a", "2", "c")]
    ids = list(corpus_bpe.encode_documents(tokenizer, documents, batch=1))
    assert not any((part == 0).any() for part in ids)
    assert tokenizer.decode(ids[0].tolist(), skip_special_tokens=False) == "a<|endoftext|>b"
    assert str(ids[0].dtype) == "uint16"


def test_all_bytes_are_in_the_vocabulary(tokenizer):
    assert len([token for token in tokenizer.get_vocab() if len(token) == 1]) >= 256


def test_sample_is_a_fixed_random_choice():
    documents = [Document("a", str(i), "x" * 100) for i in range(50)]
    chosen = corpus_bpe.bpe_sample(documents, seed=0, size=1000)
    assert len(chosen) == 10
    assert chosen == corpus_bpe.bpe_sample(documents[::-1], seed=0, size=1000)
    assert chosen != corpus_bpe.bpe_sample(documents, seed=1, size=1000)
    assert [d.name for d in chosen] != sorted(d.name for d in chosen)


def test_too_little_text_is_refused():
    with pytest.raises(CorpusError, match=r"has \d+ tokens, expected 5000"):
        corpus_bpe.train_tokenizer(iter(["a few words"]), 5000)
