"""A tiny synthetic corpus: prose and code of made-up words in two package files, to try the command without network."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

from models.pretrain.corpus_build import Recipe
from models.pretrain.corpus_sources import Source, file_sha256

RECIPE = Recipe(
    vocab_size=512,
    bpe_sample_characters=100_000,
    train_tokens=24_000,
    val_tokens=2_000,
    long_tokens=512,
    filler_small_share=1.0,
    filler_large_share=1.0,
)
SYLLABLES = ("ba", "de", "fi", "go", "lu", "mar", "nes", "pol", "qui", "ras", "sten", "tor", "ul", "vex", "wy", "zan")


def words(rng: random.Random, count: int) -> list[str]:
    """Made-up words; a few are frequent, as in text. Uses rng.random() alone, whose stream Python guarantees."""
    return [
        "".join(SYLLABLES[int(rng.random() ** 2 * len(SYLLABLES))] for _ in range(1 + int(3 * rng.random())))
        for _ in range(count)
    ]


def prose(rng: random.Random, count: int) -> str:
    sentences = [" ".join(words(rng, 12)).capitalize() + "." for _ in range(count // 12 + 1)]
    return "\n".join(sentences) + "\n"


def code(rng: random.Random, count: int) -> str:
    lines = []
    for _ in range(count // 5 + 1):
        kind, name, left, right = words(rng, 4)
        body = f"return {left} + {right} * {int(rng.random() * 1000)};"
        lines.append(f"static {kind} {name}({kind} *{left})\n{{\n\t{body}\n}}\n")
    return "\n".join(lines)


def write_wheel(folder: Path, package: str, texts: dict[str, str]) -> Path:
    """A stored (uncompressed, undated) zip, so that its sha256 is the same everywhere."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


def write_sources(folder: Path, seed: int = 0) -> tuple[Source, ...]:
    """Write the two package files into `folder` and return their pinned sources."""
    rng = random.Random(seed)
    texts = {
        "sample_prose": {f"prose/{i:03}.txt": prose(rng, 30 + int(600 * rng.random() ** 2)) for i in range(40)},
        "sample_code": {f"code/{i:03}.c": code(rng, 30 + int(600 * rng.random() ** 2)) for i in range(160)},
    }
    sources = []
    for package, documents in texts.items():
        path = write_wheel(folder, package, documents)
        sources.append(
            Source(
                name=package.replace("_", "-"),
                registry="pypi",
                package=package.replace("_", "-"),
                version="1.0",
                filename=path.name,
                sha256=file_sha256(path),
                licence="synthetic",
                reader="wheel",
                pattern=r".*\.(txt|c)",
                filler=package == "sample_code",
                hold_out_longest=2 if package == "sample_prose" else 0,
            )
        )
    return tuple(sources)
