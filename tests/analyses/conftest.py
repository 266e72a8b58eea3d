"""Tiny studies: a tokenizer of single characters, small checkpoints, own texts with key tokens set by hand."""

from __future__ import annotations

import math
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
V = 96
CUR, PREV, OUT, CONST = range(0, V), range(V, 2 * V), range(2 * V, 3 * V), 3 * V  # of the planted model's stream
D, SHARP, GAIN = 3 * V + 1, 80.0, 1.2


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
    def planted(*kinds: str) -> HybridLM:
        """Layer 0 is sliding: the previous token; layer 2 copies; layers 1 and 3 put out nothing.

        Every token carries its own identity, that of the token before it and, from the copy layer, a histogram of what
        followed earlier occurrences of it: losses_by_hand says every loss in closed form.
        """
        model = Tiny.model(
            *kinds, d_model=D, n_heads=1, d_head=V, d_ffn=3, context_length=160, window=2, rope_on_full=False,
            lightning_slopes="transnormer", rms_eps=1e-9,
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "ln" in name or name.endswith("norm.weight") else 0.0)
        one = torch.eye(V)
        model.embed.weight[:, CUR], model.embed.weight[:, CONST] = one, 1.0
        model.unembed.weight[:, OUT] = GAIN * one
        previous, copy = model.blocks[0].attn, model.blocks[2].attn
        unit = math.sqrt(2 / D)  # undoes the norm of an input with two ones
        amplitude = math.sqrt(SHARP / (1 - math.cos(1)) * math.sqrt(V)) * unit
        previous.q_proj.weight[0, CONST] = amplitude  # turned by the position: most alike one token back
        previous.k_proj.weight[0, CONST] = amplitude * math.cos(1)
        previous.k_proj.weight[V // 2, CONST] = amplitude * math.sin(1)
        previous.v_proj.weight[:, CUR], previous.o_proj.weight[PREV, :] = unit * one, one
        unit = math.sqrt(3 / D)
        sharp = (math.sqrt(SHARP * math.sqrt(V)) if copy.kind == "full" else 30.0) * unit
        copy.q_proj.weight[:, CUR], copy.k_proj.weight[:, PREV] = sharp * one, sharp * one
        if copy.kind == "full":
            copy.v_proj.weight[:, CUR], copy.o_proj.weight[OUT, :] = unit * one, one
        else:  # silu(30) = 30 in fp32, silu(0) = 0; the gate is sigmoid(0); the norm has length sqrt(V)
            copy.v_proj.weight[:, CUR], copy.o_proj.weight[OUT, :] = 30 * unit * one, 2 / math.sqrt(V) * one
        return model

    @staticmethod
    def copied_by_hand(ids: list[int], window: int | None, kind: str, previous: bool = True) -> list[np.ndarray]:
        """What the copy layer of `planted` puts out at positions 0..T-2, seeing `window` tokens (None: all)."""
        before = [ids[max(0, t - 1)] if previous else ids[t] for t in range(len(ids))]
        found = []
        for t in range(len(ids) - 1):
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            hits = [ids[s] for s in seen if before[s] == ids[t]]
            copied = np.zeros(V)
            for token in hits or [ids[s] for s in seen if kind == "full"]:  # softmax without a match is a plain mean
                copied[token] += 1
            if copied.any():
                copied /= copied.sum() if kind == "full" else math.sqrt(copied @ copied)
            found.append(copied)
        return found

    @staticmethod
    def losses_by_hand(ids, window, kind, previous=True, copied=None) -> np.ndarray:
        """float64 losses of ids[1:], with what the copy layer puts out, or with `copied` in its place."""
        losses = []
        for t, found in enumerate(Tiny.copied_by_hand(ids, window, kind, previous)):
            out = found if copied is None else copied
            logits = GAIN * out / math.sqrt((3 + out @ out) / D)
            losses.append(math.log(np.exp(logits).sum()) - logits[ids[t + 1]])
        return np.array(losses)

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
