"""Unpack zip archives safely."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from covon_avalanche.datasets.download import DataError

_MAX_RATIO = 200  # of unpacked to packed size; images hardly compress
_SCRATCH = ".unpacking-"


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip archive into a folder, completely or not at all.

    Nothing is written outside the folder, whatever the paths in the archive (``zipfile`` sees to
    that), and links become plain files. Existing files of the same names are replaced. The caller
    makes sure that no other process unpacks into the same folder.

    :raises DataError: for an archive that is damaged, encrypted or suspiciously large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for left_over in folder.glob(f"{_SCRATCH}*"):  # of a killed process
            shutil.rmtree(left_over)
        with (
            zipfile.ZipFile(archive) as packed,
            tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch,
        ):
            members = [m for m in packed.infolist() if not m.is_dir()]
            total = sum(member.file_size for member in members)
            if total > _MAX_RATIO * archive.stat().st_size:
                raise DataError(f"{archive} claims to unpack to {total} bytes, which is too much")
            unpacked = [Path(packed.extract(member, scratch)) for member in members]
            for path in unpacked:
                target = folder / path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(f"{archive} is damaged or encrypted: {error}") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked to {folder}: {error}") from error
