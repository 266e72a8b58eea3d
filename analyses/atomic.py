"""Files that appear whole or not at all: temporary name in the same folder, fsync, rename, fsync of the folder."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial"  # suffix of temporary files; they start with "." and the final name


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Give a new empty file beside `path` that replaces `path` when the block ends, or is removed if it raises.

    A killed process leaves at most one `.NAME.*.partial` file, which `remove_partials` clears. The folder is created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # not mkstemp: the umask decides the mode
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def write_bytes(path: Path | str, *pieces: bytes | memoryview) -> None:
    """Write `pieces` to `path` atomically; a full disk raises OSError and leaves what was there before."""
    with atomic_path(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)


def sync(path: Path | str) -> None:
    """Flush a file or a folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partials(path: Path | str) -> None:
    """Remove temporary files that killed writers of `path` left; only for a caller that knows no writer is alive."""
    path = Path(path)
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if name.startswith(f".{path.name}.") and name.endswith(PARTIAL):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.parent / name)
