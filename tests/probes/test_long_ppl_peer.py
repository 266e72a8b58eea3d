"""Parity with the PyPI package `longppl` 0.3.0 where its faults do not bite; its numbers are golden/longppl_peer.json.

How the numbers were made: find_key_token(TEXT, evaluator, its tokenizer, trunc_len=24, sliding_window=8, alpha=0.5,
beta=-3) and compute_longppl(...) of that package, unmodified, on the models of `tiny_llama` (weights from a sine, so no
random generator is involved), float32 on CPU. The tokenizers give no BOS and no token with a leading space.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from models.huggingface import HuggingFaceLM
from models.huggingface.tokenizer import HuggingFaceTokenizer
from probes.long_ppl import key_tokens, long_ppl

GOLDEN = Path(__file__).parent / "golden" / "longppl_peer.json"
TEXT = (
    "the red fox met a cat; the cat met the red fox. a dog ran to the den and the fox ran on; "
    "the dog met a cat and the red hen. on the den sat a red hen; the hen met the dog and the cat ran. "
    "a fox and a hen sat on the red den; the dog ran to the cat and the cat ran to the den again."
)
CHARACTERS = sorted(set(TEXT))
WORDS = sorted({word.strip(";.") for word in TEXT.split()})


def character_tokenizer():
    """One token per character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=CHARACTERS[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_tokenizer():
    """Words, punctuation and single spaces."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, " ", ";", "."])}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+| |[;.]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def evaluator(tiny_llama) -> HuggingFaceLM:
    return HuggingFaceLM(tiny_llama(len(CHARACTERS), 24, 5.882), HuggingFaceTokenizer(character_tokenizer()))


@pytest.fixture(scope="module")
def evaluated(tiny_llama) -> dict[str, HuggingFaceLM]:
    return {
        name: HuggingFaceLM(tiny_llama(len(tokenizer), width, 0.9), HuggingFaceTokenizer(tokenizer))
        for name, tokenizer, width in (("words", word_tokenizer(), 20), ("characters", character_tokenizer(), 28))
    }


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def ours(golden, evaluator):
    settings = {name: golden[name] for name in ("context", "stride", "alpha", "beta")}
    return key_tokens(evaluator, TEXT, **settings)


def test_the_tiny_models_are_those_of_the_golden_numbers(golden, evaluator, evaluated):
    for name, model in {"evaluator": evaluator, **evaluated}.items():
        total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        assert total == pytest.approx(golden["weight_sums"][name], rel=1e-9)


def test_key_intervals_equal_the_peers(golden, ours):
    assert max(end - start for start, end in golden["intervals"]) > 2  # so merging is covered
    assert [list(pair) for pair in ours.intervals] == golden["intervals"]


@pytest.mark.parametrize("name", ["words", "characters"])
def test_scores_equal_the_peers(golden, ours, evaluated, name):
    result = long_ppl(evaluated[name], TEXT, ours, bos="none")
    peer = golden["scores"][name]
    assert result.n_key == peer["n_key_token"] > 0
    assert result.n_tokens == peer["n_token"]
    assert result.log_long_ppl == pytest.approx(math.log(peer["longppl"]), abs=2e-5)
    assert result.log_ppl == pytest.approx(math.log(peer["ppl"]), abs=2e-5)
    np.testing.assert_allclose(result.key_losses.mean(), result.log_long_ppl)
