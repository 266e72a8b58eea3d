"""One writer per result: a lock that the system drops with its process, so a killed writer leaves nothing stale."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from models.errors import InputError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WriterLock:
    """An exclusive flock on `path`, whose content says who holds it; the folder is made, and removed by `discard`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self, purpose: str) -> None:
        """Take the lock or refuse with an InputError naming the holder."""
        while self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # another process removed the folder meanwhile: it is finished, try again
                continue
            try:
                self._lock(descriptor, purpose)
                if self._current(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def discard(self) -> None:
        """Remove the lock file and its folder if that is empty, then release."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            try:
                self.path.parent.rmdir()
            except OSError as error:  # not empty: another writer has come, or foreign files lie there
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
        self.release()

    def release(self) -> None:
        """Let others write; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int, purpose: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            raise InputError(
                f"{purpose} is being written by {holder}; wait for it, end it, or give another --out"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise InputError(f"{self.path}: this file system has no file locks; put --out on one that has") from error

    def _current(self, descriptor: int) -> bool:
        """Whether the locked file is still the one at `path`: its last holder may have removed it in between."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False
