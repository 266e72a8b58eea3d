"""The strongest restriction: a group's mixers put out their mean over calibration tokens, whatever they are given.

A window of one token still lets a mixer act on the current token, and a narrow window is a pattern that training never
showed. Means over tokens that are not measured remove all that a mixer says about its input, and keep its average
contribution to the stream, which zeros would not (Wang et al. 2022, arXiv:2211.00593).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

import hooks
from analyses.background import sha256
from analyses.texts import read_texts
from hooks.ablate import Head
from models.errors import InputError


@dataclass(frozen=True)
class Calibration:
    """Texts over whose tokens the means are taken; none of them is measured."""

    texts: dict[str, str]

    @property
    def sha256(self) -> str:
        return sha256(self.texts)


def calibration(folder: Path | None, measured: Sequence[str]) -> Calibration:
    """The texts of a folder or file, or the embedded ones that have no key tokens (modules of CPython).

    InputError for one that is measured itself: its means would carry it.
    """
    from analyses import data

    if folder is None:
        keys = data.key_tokens()
        found = {name: text for name, text in data.texts().items() if name not in keys}
    else:
        found = {text.name: text.content for text in read_texts([folder])}
    if both := sorted(set(found.values()) & set(measured)):
        name = next(name for name, text in found.items() if text == both[0])
        raise InputError(f"--calibration: {name!r} is measured too; give texts that are not")
    return Calibration(found)


def batches(texts: Calibration, tokenizer: Any, context: int) -> list[Int[np.ndarray, "1 T"]]:
    """The first `context` tokens of each text (behind the BOS, if the model's texts have one), one a batch."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    rows = [[*bos, *tokenizer.encode_with_offsets(text)[0]][:context] for text in texts.texts.values()]
    return [np.asarray([row], dtype=np.int64) for row in rows if row]


def means(model: Any, rows: Sequence[Int[np.ndarray, "1 T"]], layers: str | Sequence[int]) -> dict[Head, torch.Tensor]:
    """The mean output of each of the group's heads over all these tokens (hooks.head_means)."""
    return hooks.head_means(model, [torch.from_numpy(row).to(model.device) for row in rows], layers)
