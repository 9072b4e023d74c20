"""Atomic file writes."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that name no file
_STALE = 3600.0  # seconds; another process may be writing younger ones


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove what killed processes have left: files that have not changed for an hour."""
    for old in folder.glob(pattern):
        with suppress(OSError):  # another process has removed it
            if time.time() - old.stat().st_mtime > _STALE:
                old.unlink()


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write, which replaces ``path`` at the end.

    After an exception it is removed, and an existing file remains unchanged. The new file has the
    permissions of the one that it replaces, or those of the process's umask, whoever writes it.
    What a killed process has left beside ``path`` is removed if it has not changed for an hour.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent, f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.part")
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    # O_EXCL refuses an existing file or link. tempfile's files are readable by the owner alone.
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        error.filename = str(path)  # users do not know the temporary file
        raise
    try:
        mode = stat.S_IMODE((path if path.exists() else part).stat().st_mode)
        yield part
        part.chmod(mode)  # safetensors puts a file of its own there, for its owner alone
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno in _NO_ROOM and not error.filename:
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader sees the old or the new content, never a part.

    :raises OSError: if it cannot be written; an existing file remains unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    with atomic_replace(path) as part:
        part.write_bytes(data)
