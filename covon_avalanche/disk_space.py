"""Room on disks."""

from __future__ import annotations

import shutil
from pathlib import Path

_SPARE = 2**28  # bytes that shall stay free


def require_space(folder: Path, needed: int) -> None:
    """See that a folder's disk has room.

    :param needed: bytes.
    :raises ValueError: if it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE:
        raise ValueError(
            f"{folder} needs {(needed + _SPARE) / 1e9:.1f} GB of free disk, has {free / 1e9:.1f}"
        )
