"""Documents out of package files, read as streams: .deb archives (ar + tar), wheels (zip), nothing unpacked to disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from models.pretrain.corpus_sources import CorpusError, Source

Keep = Callable[[str, int], bool]  # (path, size in bytes) -> whether to read that member
Raw = tuple[str, bytes]


def order_key(seed: int, purpose: str, *names: str) -> int:
    """A 64-bit key that orders or samples documents: the same on every machine, with every version of a library."""
    digest = hashlib.blake2b("\0".join((str(seed), purpose, *names)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def sampled(seed: int, name: str, fraction: float) -> bool:
    """Whether `name` falls into a fixed random share of all names."""
    return order_key(seed, "sample", name) < fraction * 2**64


def ar_member(path: Path, prefix: str) -> io.BytesIO:
    """The first member of the ar archive `path` whose name starts with `prefix`."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise CorpusError(f"{path} is not a .deb file (no ar header). Download it again.")
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            if name.startswith(prefix):
                return io.BytesIO(file.read(size))
            file.seek(size + size % 2, io.SEEK_CUR)
    raise CorpusError(f"{path} holds no {prefix}* member. Download it again.")


def tar_members(stream: IO[bytes], matches: Keep) -> Iterator[Raw]:
    """Regular files of a compressed tar stream in archive order, .gz members decompressed."""
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if not member.isreg() or not matches(name, member.size):
                continue
            file = archive.extractfile(member)
            assert file is not None, "a regular member has content"
            data = file.read()
            yield (name.removesuffix(".gz"), gzip.decompress(data)) if name.endswith(".gz") else (name, data)


def read_deb(path: Path, matches: Keep) -> Iterator[Raw]:
    yield from tar_members(ar_member(path, "data.tar"), matches)


def read_deb_nested(path: Path, matches: Keep) -> Iterator[Raw]:
    """Members of the one tarball inside a .deb (Debian's linux-source packages), as a stream."""
    with tarfile.open(fileobj=ar_member(path, "data.tar"), mode="r|*") as outer:
        for member in outer:
            if member.isreg() and re.search(r"\.tar\.\w+$", member.name):
                inner = outer.extractfile(member)
                assert inner is not None, "a regular member has content"
                yield from tar_members(inner, matches)


def read_wheel(path: Path, matches: Keep) -> Iterator[Raw]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if matches(info.filename, info.file_size):
                yield info.filename, archive.read(info)


def read_hotpotqa(path: Path, matches: Keep) -> Iterator[Raw]:
    """Each distinct Wikipedia paragraph of the questions' contexts, under its title."""
    for _, data in read_wheel(path, matches):
        seen: dict[str, None] = {}
        for question in json.loads(data):
            for title, sentences in question["context"]:
                seen[f"{title}\n\n{''.join(sentences).strip()}\n"] = None
        for text in seen:
            title = text.split("\n", 1)[0]
            digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()  # some titles occur with two texts
            yield f"{title}#{digest}", text.encode()


READERS: dict[str, Callable[[Path, Keep], Iterator[Raw]]] = {
    "deb": read_deb,
    "deb-nested": read_deb_nested,
    "wheel": read_wheel,
    "hotpotqa": read_hotpotqa,
}


def read_source(source: Source, path: Path, keep: Keep) -> Iterator[Raw]:
    """(name, bytes) of the source's documents in archive order; `keep` sees (path, bytes) before a member is read."""
    pattern = re.compile(source.pattern)
    try:
        yield from READERS[source.reader](path, lambda name, size: bool(pattern.fullmatch(name)) and keep(name, size))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise CorpusError(f"source {source.name}: {path} cannot be read ({error}). Download it again.") from error
