"""Zip archives, unpacked without trusting them."""

from __future__ import annotations

import shutil
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from covon_avalanche.datasets.download import DataError
from covon_avalanche.disk_space import require_space

_LARGEST_RATIO = 200  # of unpacked to packed size; images hardly shrink
_SCRATCH = ".unpacking-"
_ENCRYPTED = 0x1  # the bit of a member's flags


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip archive into a folder, all of it or nothing.

    Refused are members whose path leads out of the folder or that come twice, links, encrypted
    members, and archives that claim to grow beyond all measure. Existing files of the same names
    are replaced, and what a killed process left is removed: the caller sees to it that no other
    process unpacks to the same folder.

    :raises DataError: naming archive, member and rule.
    :raises ValueError: for a disk without room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for left_over in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left_over)
        with zipfile.ZipFile(archive) as packed:
            members = [m for m in packed.infolist() if not m.is_dir()]
            for member in members:
                _check(archive, member)
            _check_distinct(archive, members)
            total = sum(member.file_size for member in members)
            if total > _LARGEST_RATIO * max(archive.stat().st_size, 1):
                raise DataError(f"{archive} claims to unpack to {total} bytes, which is too much")
            require_space(folder, total)
            with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as name:
                scratch = Path(name)
                for member in members:
                    _extract(archive, packed, member, scratch)
                for member in members:
                    target = folder / member.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (scratch / member.filename).replace(target)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{archive} is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked to {folder}: {error}") from error


def _check(archive: Path, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    if not path.parts:
        raise DataError(f"{archive}: {member.filename!r} is no name of a file")
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in path.parts[0]:
        raise DataError(f"{archive}: {member.filename!r} would be written outside of the folder")
    mode = member.external_attr >> 16
    if mode and not (stat.S_ISREG(mode) or stat.S_IFMT(mode) == 0):
        raise DataError(f"{archive}: {member.filename!r} is a link or device, not a file")
    if member.flag_bits & _ENCRYPTED:
        raise DataError(f"{archive}: {member.filename!r} is encrypted")


def _check_distinct(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    seen: set[PurePosixPath] = set()
    for member in members:
        path = PurePosixPath(member.filename)
        if path in seen:
            raise DataError(f"{archive}: {member.filename!r} is there twice")
        seen.add(path)


def _extract(
    archive: Path, packed: zipfile.ZipFile, member: zipfile.ZipInfo, scratch: Path
) -> None:
    target = scratch / member.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    with packed.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 2**20)
    if target.stat().st_size != member.file_size:
        raise DataError(f"{archive}: {member.filename!r} has not the size it claims")
