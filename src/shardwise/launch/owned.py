"""Temporary folders with an owner: the process that created a folder holds a lock in it; unlocked ones are removed.

A lock is released however its process ends. A process id in its place would be ambiguous: ids are reused, and mean
something else in another container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from shardwise.spec.errors import SpecError

PREFIX = "shardwise-"
LOCK = ".owner"


class OwnedFolder:
    """A new folder ``path`` in ``root``, until `close`; folders there whose owners are gone are removed first."""

    def __init__(self, kind: str, root: Path | None = None) -> None:
        self.root = Path(tempfile.gettempdir()) if root is None else root
        clear_unowned(self.root)
        self._lock: int | None
        self.path, self._lock = self._made(kind)

    def require_room(self, size: int, why: str) -> None:
        """Raises SpecError if its disk has less free space than this."""
        try:
            require_room(self.path, size)
        except OSError as error:
            raise _refused(self.root, error, why) from None

    def close(self) -> None:
        """A second call does nothing: by then the lock's file descriptor may be another file's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _made(self, kind: str) -> tuple[Path, int]:
        while True:
            try:
                path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=self.root))
                lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _refused(self.root, error, "temporary files go there") from None
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return path, lock
            os.close(lock)  # another process removed it before it was locked


def require_room(folder: Path, size: int) -> None:
    """Raises OSError if a file of this many bytes cannot be written."""
    probe = folder / "room"
    try:
        probe.write_bytes(bytes(size))
    finally:
        probe.unlink(missing_ok=True)


def clear_unowned(root: Path) -> None:
    """Removes this user's folders that no living process holds."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is being created, locked, or gone
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def is_owned(folder: Path) -> bool:
    """Whether the process that made a folder lives and has not closed it."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _refused(root: Path, error: OSError, why: str) -> SpecError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    problem = "has no space left" if full else f"cannot be written ({error.strerror})"
    return SpecError(str(root), f"{problem}: {why}", f"free some of it (df {root})" if full else "check it")
