"""Downloads that go on where they broke off, and are checked before they count."""

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
from covon_avalanche.disk_space import require_space

_CHUNK = 2**20
_TIMEOUT = 60  # seconds without a byte


class DataError(ValueError):
    """A data set cannot be had, or is not what it should be; one sentence."""


def download(
    file: RemoteFile,
    folder: Path,
    *,
    attempts: int = 5,
    pause: float = 2.0,
    progress: Callable[[int], None] = lambda bytes_so_far: None,
) -> Path:
    """Fetch a file into a folder; at once if it is there already, with the right checksum.

    What has arrived is kept in ``.NAME.part``; the next call, or attempt, asks for the rest.

    :param attempts: how often a broken connection, or a server with an error (5xx), is tried.
    :param pause: seconds before the second attempt; it doubles each time.
    :raises DataError: naming address and cause; what has arrived stays, unless it is wrong.
    :raises ValueError: for a disk without room.
    """
    if urlsplit(file.url).scheme not in ("http", "https"):
        raise DataError(f"{file.url} is neither http nor https")
    target = folder / file.name
    if target.is_file():
        _check(file, target)
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{file.name}.part"
    for attempt in range(attempts):
        try:
            _fetch(file, part, progress)
            break
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if isinstance(error, HTTPError) and error.code < 500:
                said = f"{error.code} {error.reason}"
                raise DataError(f"{file.url}: the server says {said}") from error
            if attempt + 1 == attempts:
                raise DataError(
                    f"{file.url}: the connection failed {attempts} times ({error}); what has "
                    "arrived is kept, the same command goes on from there"
                ) from error
            time.sleep(pause * 2**attempt)
        except OSError as error:
            raise DataError(f"{part} cannot be written: {error.strerror}") from error
    try:
        _check(file, part)
    except DataError:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, target)
    return target


def _fetch(file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have > file.size:
        part.unlink()
        have = 0
    if file.size is not None and have == file.size:
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        response = urlopen(Request(file.url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":  # all of it is there
            return
        part.unlink()
        _fetch(file, part, progress)
        return
    with response:
        if have and response.status != 206:  # the server knows no ranges
            have = 0
        announced = response.headers.get("Content-Length")
        expected = None if announced is None else have + int(announced)
        require_space(part.parent, (file.size or expected or 0) - have)
        with part.open("ab" if have else "wb") as out:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                if file.size is not None and have > file.size:
                    raise DataError(f"{file.url} is larger than the {file.size} bytes it should be")
                progress(have)
    if expected is not None and have < expected:
        raise ConnectionError(f"it broke off after {have} of {expected} bytes")


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
            f"{file.url} has the md5 {digest.hexdigest()} instead of {file.md5}: it is damaged, or "
            "another version"
        )
