"""Tiny studies: a tokenizer of single characters, small checkpoints, own texts with key tokens set by hand."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

import models
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from models.tokenizer import Tokenizer
from probes import long_ppl

CHARACTERS = string.printable[:96]  # digits, letters, punctuation, space, then line break
SHORT = 24  # the short context of the made-up evaluator


class Tiny:
    """Builders; every size differs from every other."""

    characters = CHARACTERS
    short = SHORT

    @staticmethod
    def tokenizer() -> Tokenizer:
        vocab = {character: index for index, character in enumerate(CHARACTERS.replace("\t", "\n"))}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="~"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = tokenizers.decoders.Fuse()
        return Tokenizer(backend)

    @staticmethod
    def model(*kinds: str, seed: int = 0, std: float | None = 0.3, **changes) -> HybridLM:
        """Random weights; `std` None keeps those of an untrained model."""
        torch.manual_seed(seed)
        fields = dict(
            d_model=20, n_layers=len(kinds), n_heads=2, n_kv_heads=1, d_head=10, d_ffn=28, vocab_size=len(CHARACTERS),
            context_length=160, layer_kinds=kinds, window=6, rope_base=1e4, mamba2_state=7,
        )  # fmt: skip
        model = HybridLM(HybridConfig(**{**fields, **changes})).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if std is not None and parameter.ndim == 2:
                parameter.normal_(0, std)
            if std is not None and name.endswith(("dt_bias", "A_log")):
                parameter.fill_(-1.5)  # decays that reach beyond a few tokens
        model.tokenizer = Tiny.tokenizer()
        return model

    @staticmethod
    def save(model: HybridLM, path: Path) -> Path:
        return models.save(model, path)

    @staticmethod
    def key_tokens(text: str, key: list[int], evaluator: str = "by hand") -> long_ppl.KeyTokens:
        """Single characters `key` are key tokens: well predicted by everything before, badly by the last SHORT."""
        long, short = np.full(len(text), -0.25), np.full(len(text), -0.25)
        long[0], short[:SHORT] = np.nan, np.nan
        short[key] = -5.0
        offsets = np.stack([np.arange(len(text)), np.arange(len(text)) + 1], axis=1)
        return long_ppl.KeyTokens(
            evaluator=evaluator, context=SHORT, stride=6, alpha=2.0, beta=-2.0, bos=False, token_ids_sha256="0" * 64,
            text_sha256=long_ppl.text_sha256(text), n_characters=len(text), offsets=offsets, log_p_long=long,
            log_p_short=short,
        )  # fmt: skip

    @staticmethod
    def texts(folder: Path, texts: dict[str, str], key: dict[str, list[int]]) -> list[str]:
        """Writes texts and key tokens; gives the command-line options that name them."""
        for name in ("texts", "keys"):
            (folder / name).mkdir(parents=True)
        for name, text in texts.items():
            (folder / "texts" / f"{name}.txt").write_text(text)
            long_ppl.save_key_tokens(Tiny.key_tokens(text, key[name]), folder / "keys" / f"{name}.json")
        return ["--texts", str(folder / "texts"), "--key-tokens", str(folder / "keys")]

    @staticmethod
    def recall_text(seed: int, filler: int = 60) -> tuple[str, list[int]]:
        """Pairs like "Q7", lower-case filler, then the pairs again; the second digits are the key tokens."""
        rng = np.random.default_rng(seed)
        letters = rng.choice(list(string.ascii_uppercase), 8, replace=False)
        pairs = [f"{letter}{rng.integers(10)}" for letter in letters]
        text = "".join(pairs) + "".join(rng.choice(list("abcdefgh"), filler))
        key = []
        for index in rng.permutation(len(pairs)):
            text += "".join(rng.choice(list("abcdefgh"), 2)) + pairs[index]
            key.append(len(text) - 1)
        return text, key

    @staticmethod
    def recall_folder(folder: Path, count: int = 3) -> tuple[dict[str, str], dict[str, list[int]], list[str]]:
        """`count` recall texts of different lengths and numbers of key tokens: texts, key tokens, their options."""
        made = {f"text{i}": Tiny.recall_text(i, 60 + 7 * i) for i in range(count)}
        texts = {name: text for name, (text, _) in made.items()}
        key = {name: key[2 * i % 6 :] for i, (name, (_, key)) in enumerate(made.items())}
        return texts, key, Tiny.texts(folder, texts, key)


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny
