"""Download files, resume interrupted downloads, and check sizes and checksums."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from covon_avalanche.datasets.catalogue import RemoteFile

_CHUNK = 2**20
_TIMEOUT = 60  # seconds without a byte


class DataError(ValueError):
    """A data set is unavailable, incomplete or damaged; the message is one sentence."""


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
    :raises DataError: naming address and cause.
    """
    if urlsplit(file.url).scheme not in ("http", "https"):
        raise DataError(f"{file.url} is neither http nor https")
    target = folder / file.name
    if target.is_file():
        _check(file, target)
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{file.name}.part"
    for attempt in range(1, attempts + 1):
        try:
            _fetch(file, part, progress)
            break
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if isinstance(error, HTTPError) and error.code < 500:
                reply = f"{error.code} {error.reason}"
                raise DataError(f"{file.url}: the server says {reply}") from error
            if attempt == attempts:
                raise DataError(
                    f"{file.url}: the connection failed {attempts} times ({error}); run the same "
                    "command again to resume"
                ) from error
            time.sleep(pause * 2 ** (attempt - 1))
        except OSError as error:
            raise DataError(f"{part} cannot be written: {error.strerror}") from error
    try:
        _check(file, part)
    except DataError:
        part.unlink()
        raise
    os.replace(part, target)
    return target


def _fetch(file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have and have == file.size:
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        response = urlopen(Request(file.url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not have:  # range not satisfiable
            raise
        if error.headers.get("Content-Range") != f"bytes */{have}":  # otherwise it is complete
            part.unlink()
            _fetch(file, part, progress)
        return
    with response:
        if response.status != 206:  # the server ignores ranges
            have = 0
        length = response.headers.get("Content-Length")
        expected = None if length is None else have + int(length)
        if file.size is not None and expected not in (None, file.size):
            raise DataError(f"{file.url} has {expected} bytes instead of {file.size}")
        with part.open("ab" if have else "wb") as out:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                progress(have)
    if expected is not None and have < expected:
        raise ConnectionError(f"interrupted after {have} of {expected} bytes")


def _check(file: RemoteFile, path: Path) -> None:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DataError(f"{path} has {size} bytes instead of {file.size}: remove it and try again")
    if file.md5 is None:
        return
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != file.md5:
        raise DataError(
            f"{file.url} has the md5 {digest.hexdigest()} instead of {file.md5}: it is damaged or "
            "has changed"
        )
