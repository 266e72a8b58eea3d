"""The training corpus and its tokenizer, rebuilt byte for byte: `python -m models.pretrain.corpus --out corpus/`.

Prose and documentation of seven packages, filled up with Linux C files so that long and short documents hold the same
number of tokens; without duplicates, the held-out speeches, and all that shares a passage with the evaluation texts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models import command_line
from models.pretrain import corpus_build, corpus_pack, corpus_sample
from models.pretrain.corpus_sources import SOURCES, locate

EVALUATION_TEXTS = Path(__file__).resolve().parents[2] / "analyses" / "data" / "texts"


@dataclass(frozen=True)
class Config:
    """Build the training corpus, or pack or unpack a built one."""

    out: Path = Path("corpus")
    """Folder of the corpus: train.bin, val.bin, their .idx.npy, tokenizer.json, corpus.json."""
    sources: Path | None = None
    """Folder that already holds the package files; nothing is fetched then."""
    cache: Path = Path("~/.cache/hybridscope/sources")
    """Folder that fetched package files are kept in."""
    evaluation_texts: Path = EVALUATION_TEXTS
    """Folder of texts (*.txt, *.py) that no training document may share a passage with."""
    allow_other_versions: bool = False
    """Take other versions of the packages than the pinned ones: another corpus, recorded in corpus.json."""
    overwrite: bool = False
    """Replace a corpus of another recipe in the out folder."""
    pack: Path | None = None
    """Then pack the four files that training needs into this .tar.xz (`tar xf FILE -C DIR` or --unpack)."""
    unpack: Path | None = None
    """Only unpack this .tar.xz into the out folder, verify it and rebuild the document indices."""
    sample: bool = False
    """Build a tiny corpus of synthetic documents instead (seconds, no network)."""


def build(config: Config) -> dict[str, Any]:
    """The corpus that `config` asks for, built or verified in config.out; returns the content of corpus.json."""
    with tempfile.TemporaryDirectory() as temporary:
        if config.sample:
            recipe, sources = corpus_sample.RECIPE, corpus_sample.write_sources(Path(temporary))
            folder, fetch = Path(temporary), False
        else:
            recipe, sources = corpus_build.Recipe(), SOURCES
            folder, fetch = (config.sources or config.cache).expanduser(), config.sources is None
        with tqdm(sources, desc="fetch and verify" if fetch else "verify", unit="package") as stage:
            located = [locate(source, folder, fetch, config.allow_other_versions) for source in stage]
        return corpus_build.build(config.out, recipe, located, config.evaluation_texts, config.overwrite)


def run(config: Config) -> None:
    if config.unpack is not None:
        corpus_pack.unpack(config.unpack, config.out)
        print(summary(corpus_build.verify(config.out)))
        return
    print(summary(build(config)))
    if config.pack is not None:
        size = corpus_pack.pack(config.out, config.pack)
        print(f"packed {config.pack}: {size / 2**20:.1f} MiB; unpack: tar xf {config.pack} -C DIR")


def summary(record: dict[str, Any]) -> str:
    """Counts of a corpus.json as a few lines."""
    lines = []
    for part in ("train", "val"):
        row = record[part]
        long, short = (row["halves"][half]["tokens"] for half in ("long", "short"))
        lines.append(
            f"{part}: {row['tokens']:,} tokens in {row['documents']:,} documents, "
            f"{row['characters'] / row['tokens']:.2f} characters a token, long {long:,}, short {short:,}"
        )
    lines += [f"{name}: {sum(counts.values()):,} documents removed" for name, counts in record["removed"].items()]
    lines += [f"sha256 {sha256} {name}" for name, sha256 in record["outputs"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(run, Config, prog="python -m models.pretrain.corpus")
