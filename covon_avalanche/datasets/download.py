"""Download files, resume interrupted downloads, check checksums, and unpack archives."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from covon_avalanche.datasets.catalogue import RemoteFile

_CHUNK = 2**20
_TIMEOUT = 60  # seconds without a byte


def download(
    file: RemoteFile,
    folder: Path,
    *,
    attempts: int = 5,
    pause: float = 2.0,
    progress: Callable[[int], None] = lambda bytes_so_far: None,
) -> Path:
    """Download a file into a folder, unless it is already there with the right checksum.

    Partial content is kept in ``.NAME.part``; the next attempt or call requests the rest.

    :param attempts: how often to try if the connection fails or the server reports an error
        (5xx).
    :param pause: seconds before the second attempt; doubled before each further one.
    :param progress: called with the number of bytes received so far.
    :raises ValueError: naming address and cause.
    """
    from torchvision.datasets.utils import check_integrity

    target = folder / file.name
    if check_integrity(target, file.md5):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{file.name}.part"
    for attempt in range(attempts):
        try:
            _fetch(file, part, progress)
            break
        except (OSError, HTTPException) as error:
            refused = isinstance(error, HTTPError) and error.code < 500
            if refused or attempt == attempts - 1:
                raise ValueError(
                    f"{file.url}: {error} (run the same command again to resume)"
                ) from error
            time.sleep(pause * 2**attempt)
    if not check_integrity(part, file.md5):
        part.unlink()
        raise ValueError(f"{file.url} does not have the md5 {file.md5}: run the command again")
    part.replace(target)
    return target


def _fetch(file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
    """Request the missing bytes of a file."""
    received = part.stat().st_size if part.exists() else 0
    if received >= file.size:
        return
    request = Request(file.url, headers={"Range": f"bytes={received}-"})
    with urlopen(request, timeout=_TIMEOUT) as response:
        resumed = response.status == 206  # otherwise the server ignores ranges
        with part.open("ab" if resumed else "wb") as out:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                progress(out.tell())
            received = out.tell()
    if received < file.size:
        raise ConnectionError(f"interrupted after {received} of {file.size} bytes")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip archive into a folder; existing files of the same names are replaced.

    ``zipfile`` never writes outside the folder, and extracts links as plain files. If it is
    interrupted, the folder holds a part of the files: unpack again.

    :raises ValueError: for an archive that cannot be unpacked.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
