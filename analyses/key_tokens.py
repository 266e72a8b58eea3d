"""Which tokens need a long context? Runs an evaluator model over a folder of texts and writes their key tokens.

i is a key token if log p(x_i | long) - log p(x_i | short) > alpha and log p(x_i | long) > beta (LongPPL, Fang et al.,
ICLR 2025).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from models import command_line
from models.command_line import Flag

if TYPE_CHECKING:
    from probes.long_ppl import KeyTokens


@dataclass(frozen=True)
class Config:
    """Key tokens of every *.txt of a folder, one JSON file each. A rerun computes only what is missing."""

    evaluator: Annotated[Path, tyro.conf.Positional]
    """Checkpoint directory of the evaluator, native or Hugging Face, with its tokenizer."""
    texts: Path
    """Folder of *.txt files, UTF-8."""
    out: Path
    """Folder for the JSON files, one per text."""
    length: int | None = None
    """Evaluator tokens of each text that are used; default: all."""
    context: int = 4096
    """K: the short context is K..K+stride-1 tokens; only tokens from K on can be key."""
    stride: int = 1024
    """Tokens between the starts of two short contexts."""
    alpha: float = 2.0
    """Least gain in log p by the long context, nats."""
    beta: float = -2.0
    """Least log p given the long context, nats."""
    name: str | None = None
    """Name of the evaluator in the files; default: its directory's name."""
    batch_size: int = 4
    """Windows per forward."""
    device: str | None = None
    """cpu, cuda, ...; default: CUDA if there is one."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    overwrite: bool = False
    """Replace files that were made with other settings."""


def run(config: Config) -> dict[str, KeyTokens]:
    """Name of the text -> key tokens. Each file is written as soon as it is done. ValueError for bad input."""
    import models
    from analyses.data import read_text
    from probes.long_ppl import key_tokens, save_key_tokens

    paths = sorted(config.texts.glob("*.txt"))
    if not paths:
        raise ValueError(f"{config.texts} holds no *.txt file; expected a folder of texts")
    name = config.name if config.name is not None else config.evaluator.resolve().name
    results = {path.stem: _finished(config, name, path.stem, read_text(path)) for path in paths}
    todo = [path for path in paths if results[path.stem] is None]
    if todo:
        evaluator = models.load(config.evaluator, config.device, trust_remote_code=config.trust_remote_code)
        config.out.mkdir(parents=True, exist_ok=True)
    for path in todo:
        started = time.perf_counter()
        found = key_tokens(
            evaluator,
            read_text(path),
            context=config.context,
            stride=config.stride,
            length=config.length,
            alpha=config.alpha,
            beta=config.beta,
            name=name,
            batch_size=config.batch_size,
        )
        save_key_tokens(found, config.out / f"{path.stem}.json")
        results[path.stem] = found
        print(
            f"{path.stem}: {found.n_key} key tokens of {found.n_tokens}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return {stem: found for stem, found in results.items() if found is not None}


def _finished(config: Config, name: str, stem: str, text: str) -> KeyTokens | None:
    """The stored key tokens if they are of this text, evaluator and settings; ValueError if they are of others."""
    from probes.long_ppl import load_key_tokens, text_sha256

    path = config.out / f"{stem}.json"
    if config.overwrite or not path.exists():
        return None
    stored = load_key_tokens(path)
    found = (stored.evaluator, stored.context, stored.stride, stored.alpha, stored.beta, stored.text_sha256)
    wanted = (name, config.context, config.stride, config.alpha, config.beta, text_sha256(text[: stored.n_characters]))
    length_differs = stored.n_tokens != config.length if config.length is not None else stored.n_characters != len(text)
    if found != wanted or length_differs:
        raise ValueError(f"{path} was made with other settings or another text; pass --overwrite or another --out")
    return stored


def main(config: Config) -> None:
    results = run(config)
    print(f"{sum(found.n_key for found in results.values())} key tokens in {len(results)} texts")


if __name__ == "__main__":
    command_line.run(main, Config, prog="python -m analyses.key_tokens")
