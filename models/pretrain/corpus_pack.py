"""One .tar.xz of the four files that training needs, unpacked by plain `tar xf` or by `--unpack`.

LZMA with lp = pb = 1 models a stream of 16-bit values (contexts know whether a byte is the low or the high one), and a
dictionary larger than train.bin finds every repeated passage. Packing takes 2.5 GB of memory, unpacking the dictionary.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.pretrain.corpus_select import write_index
from models.pretrain.corpus_sources import CorpusError

PACKED = ("corpus.json", "tokenizer.json", "val.bin", "train.bin")
MAX_DICTIONARY = 192 << 20
FILTER: dict[str, Any] = {
    "id": lzma.FILTER_LZMA2,
    "preset": 9 | lzma.PRESET_EXTREME,
    "lc": 3,
    "lp": 1,
    "pb": 1,
    "nice_len": 273,
}


class Progress(io.BufferedReader):
    """A file whose reading moves a progress bar."""

    def __init__(self, path: Path, bar: tqdm[Any]) -> None:
        super().__init__(io.FileIO(path))
        self.bar = bar

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bar.update(len(data))
        return data


def pack(folder: Path, target: Path) -> int:
    """Write the packed corpus (same bytes for the same corpus) and return its size in bytes."""
    total = sum((folder / name).stat().st_size for name in PACKED)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    filters = [FILTER | {"dict_size": min(MAX_DICTIONARY, max(1 << 20, total))}]
    with (
        tqdm(total=total, desc="pack", unit="B", unit_scale=True, mininterval=1) as bar,
        lzma.open(partial, "wb", check=lzma.CHECK_CRC64, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in PACKED:
            info = tarfile.TarInfo(name)
            info.size = (folder / name).stat().st_size
            with Progress(folder / name, bar) as file:
                archive.addfile(info, file)
    partial.replace(target)
    return target.stat().st_size


def unpack(packed: Path, folder: Path) -> None:
    """Unpack into `folder` and write the document indices; members other than the four expected files are refused."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(packed, mode="r:xz") as archive:
            for member in archive:
                if member.name not in PACKED or not member.isreg():
                    raise CorpusError(f"{packed} holds {member.name!r}; expected only {', '.join(PACKED)}. Pack again.")
                archive.extract(member, folder, filter="data")
        for name in ("train", "val"):
            write_index(folder / f"{name}.bin", folder / f"{name}.idx.npy")
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise CorpusError(f"{packed} cannot be unpacked ({error}). Expected a file written by --pack.") from error
