"""A corpus in fewer tokens: the same text under the first merges of its BPE alone, for models with small embeddings.

    python -m models.pretrain.corpus_vocabulary --corpus corpus --size 512 --out corpus-512

BPE merges pairs in the order of their rank, so the text under the first n merges is what is left when later ones are
undone: a table lookup on the ids, no text is encoded anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from models import command_line
from models.pretrain.corpus_sources import CorpusError

CHUNK = 1 << 22
PARTS, TOKENIZER = ("train.bin", "val.bin"), "tokenizer.json"


@dataclass(frozen=True)
class Config:
    """Write a corpus whose tokenizer has only the first tokens of another one's."""

    size: int
    """Tokens to keep: the special token, 256 bytes and the first merges."""
    out: Path
    """Folder to write: train.bin, val.bin, tokenizer.json."""
    corpus: Path = Path("corpus")
    """Folder of the corpus made by `make corpus`."""


def narrowed(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer.json with its first `size` tokens; CorpusError if ids do not follow the order of the merges."""
    vocab, merges = tokenizer["model"]["vocab"], _merges(tokenizer)
    first = len(vocab) - len(merges)
    if not first <= size <= len(vocab):
        raise CorpusError(f"--size is {size}; expected {first} (no merge) to {len(vocab)} (all merges)")
    wrong = [pair for i, pair in enumerate(merges) if vocab["".join(pair)] != first + i]
    if wrong:
        raise CorpusError(f"merge {wrong[0]} does not make the token of its rank; expected ids in the order of merges")
    model = {
        **tokenizer["model"],
        "vocab": {token: i for token, i in vocab.items() if i < size},
        "merges": tokenizer["model"]["merges"][: size - first],
    }
    return {**tokenizer, "model": model}


def expansions(tokenizer: dict[str, Any], size: int) -> list[list[int]]:
    """For every id of the tokenizer, the ids below `size` that its text has without the later merges."""
    vocab, merges = tokenizer["model"]["vocab"], _merges(tokenizer)
    first = len(vocab) - len(merges)
    found = [[i] for i in range(first)]
    for rank, (left, right) in enumerate(merges):
        whole = first + rank
        found.append([whole] if whole < size else found[vocab[left]] + found[vocab[right]])
    return found


def expanded(ids: Int[np.ndarray, " N"], table: Sequence[Sequence[int]]) -> Int[np.ndarray, " M"]:
    """Each id replaced by its expansion, uint16."""
    flat = np.concatenate([np.array(row, np.uint16) for row in table])
    lengths = np.array([len(row) for row in table])
    starts = np.cumsum(lengths) - lengths
    size = lengths[ids]
    before = np.cumsum(size) - size
    return flat[np.repeat(starts[ids] - before, size) + np.arange(size.sum())]


def narrow(config: Config) -> dict[str, int]:
    """Writes the folder and returns the tokens of each part."""
    tokenizer = json.loads((config.corpus / TOKENIZER).read_text("utf-8"))
    small, table = narrowed(tokenizer, config.size), expansions(tokenizer, config.size)
    if config.out.is_dir() and any(config.out.iterdir()):
        raise CorpusError(f"--out {config.out} is not empty; expected a new folder")
    config.out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for part in PARTS:
        ids = np.memmap(config.corpus / part, dtype=np.uint16, mode="r")
        with (config.out / part).open("wb") as file:
            for start in tqdm(range(0, len(ids), CHUNK), desc=part, unit="piece", mininterval=1):
                file.write(expanded(np.asarray(ids[start : start + CHUNK]), table).tobytes())
        counts[part] = (config.out / part).stat().st_size // 2
    (config.out / TOKENIZER).write_text(json.dumps(small, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return counts


def _merges(tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    if tokenizer["model"]["type"] != "BPE":
        raise CorpusError(f"the tokenizer is of type {tokenizer['model']['type']}; expected BPE")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in tokenizer["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def run(config: Config) -> None:
    for part, count in narrow(config).items():
        print(f"{part}: {count:,} tokens of {config.size}")


if __name__ == "__main__":
    command_line.run(run, Config, prog="python -m models.pretrain.corpus_vocabulary")
