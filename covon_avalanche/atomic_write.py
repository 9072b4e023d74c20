"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[Path]:
    """Another name to write a file under; at the end it takes the place of ``path`` at once.

    After an exception it is removed, and an older file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader sees the old or the new one, never a part.

    :raises OSError: if it cannot be written; an older file stays as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    with replaced_when_whole(path) as part:
        part.write_bytes(data)
