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
import torch

from models.huggingface import HuggingFaceLM
from models.huggingface_tokenizer import HuggingFaceTokenizer
from probes.long_ppl import key_tokens, long_ppl

GOLDEN = Path(__file__).parent / "golden" / "longppl_peer.json"
TEXT = (
    "the red fox met a cat; the cat met the red fox. a dog ran to the den and the fox ran on; "
    "the dog met a cat and the red hen. on the den sat a red hen; the hen met the dog and the cat ran. "
    "a fox and a hen sat on the red den; the dog ran to the cat and the cat ran to the den again."
)
CHARACTERS = sorted(set(TEXT))
WORDS = sorted({word.strip(";.") for word in TEXT.split()})


def tiny_llama(vocab_size: int, width: int, phase: float):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.ndim == 2:
                steps = torch.arange(parameter.numel(), dtype=torch.float64)
                wave = torch.sin(steps * (1.7 + 0.31 * index + phase) + steps.remainder(7) * index)
                parameter.copy_((1.2 * wave).view_as(parameter))
    return model


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


def evaluator() -> HuggingFaceLM:
    return HuggingFaceLM(tiny_llama(len(CHARACTERS), 24, 5.882), HuggingFaceTokenizer(character_tokenizer()))


def evaluated(words: bool) -> HuggingFaceLM:
    tokenizer = word_tokenizer() if words else character_tokenizer()
    return HuggingFaceLM(tiny_llama(len(tokenizer), 20 if words else 28, 0.9), HuggingFaceTokenizer(tokenizer))


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def ours(golden):
    settings = {name: golden[name] for name in ("context", "stride", "alpha", "beta")}
    return key_tokens(evaluator(), TEXT, **settings)


def test_the_tiny_models_are_those_of_the_golden_numbers(golden):
    for name, model in (("evaluator", evaluator()), ("words", evaluated(True)), ("characters", evaluated(False))):
        total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        assert total == pytest.approx(golden["weight_sums"][name], rel=1e-9)


def test_key_intervals_equal_the_peers(golden, ours):
    assert max(end - start for start, end in golden["intervals"]) > 2  # so merging is covered
    assert [list(pair) for pair in ours.intervals] == golden["intervals"]


@pytest.mark.parametrize("name", ["words", "characters"])
def test_scores_equal_the_peers(golden, ours, name):
    result = long_ppl(evaluated(name == "words"), TEXT, ours, bos="none")
    peer = golden["scores"][name]
    assert result.n_key == peer["n_key_token"] > 0
    assert result.n_tokens == peer["n_token"]
    assert result.log_long_ppl == pytest.approx(math.log(peer["longppl"]), abs=2e-5)
    assert result.log_ppl == pytest.approx(math.log(peer["ppl"]), abs=2e-5)
    np.testing.assert_allclose(result.key_losses.mean(), result.log_long_ppl)
