"""Checkpoints on disk: tensors in safetensors, the rest in JSON. Nothing of them is executed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.experiment.machine import versions

FORMAT = 1
_DECISIVE = ("covon_avalanche", "torch", "avalanche-lib")


class Point(NamedTuple):
    """Where a run resumes: what comes next, all counted from 0."""

    experience: int
    epoch: int = 0
    batch: int = 0

    @property
    def is_between(self) -> bool:
        """Whether no experience has been begun and not finished."""
        return self == Point(self.experience)

    def __str__(self) -> str:
        return f"{self.experience:04d}-{self.epoch:05d}-{self.batch:07d}"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one sentence."""


class OtherVersionsError(CheckpointError):
    """A checkpoint made by other versions: what it stores need not fit these."""


def save_checkpoint(
    folder: Path, point: Point, state: Mapping[str, Any], tensors: Mapping[str, Tensor], run: str
) -> None:
    """Write ``POINT.safetensors``, then ``POINT.json``, which vouches for both.

    :param run: identity of the run; the checkpoint is of no use to another one.
    :raises OSError: if there is no room or no permission; older checkpoints stay as they are.
    """
    data = folder / f"{point}.safetensors"
    with atomic_replace(data) as part:
        try:
            save_file(dict(tensors), part)
        except SafetensorError as error:
            raise OSError(f"{data} cannot be written: {error}") from error
        digest = _file_digest(part)
    about = {"format": FORMAT, "run": run, "versions": _versions()}
    text = json.dumps({**about, "state": state, "tensors": digest})
    write_atomically(
        folder / f"{point}.json", json.dumps({"digest": _digest(text.encode()), "body": text})
    )


def load_checkpoint(folder: Path, point: Point, run: str) -> tuple[dict[str, Any], dict]:
    """State and tensors of a checkpoint.

    :raises CheckpointError: if it is truncated, changed, of another run or a newer format.
    :raises OtherVersionsError: if it was made by other versions.
    """
    file = folder / f"{point}.json"
    try:
        outer = json.loads(file.read_text(encoding="utf-8"))
        text = outer["body"]
        if outer["digest"] != _digest(text.encode()):
            raise CheckpointError(f"the checkpoint {file} has been changed")
        body = json.loads(text)
        if body["format"] > FORMAT:
            raise CheckpointError(f"the checkpoint {file} is of a newer version of this package")
        if body["run"] != run:
            raise CheckpointError(f"the checkpoint {file} belongs to another run")
        if body.get("versions") != _versions():
            made = " and ".join(f"{k} {v}" for k, v in body.get("versions", {}).items())
            raise OtherVersionsError(
                f"the checkpoint {file} was made by {made or 'other versions'}, not by those here"
            )
        data = file.with_suffix(".safetensors")
        if body["tensors"] != _file_digest(data):
            raise CheckpointError(f"the checkpoint {data} is damaged")
        return body["state"], load_file(data)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error


def stored_points(folder: Path) -> list[Point]:
    """The points there are files for, latest first."""
    pattern = re.compile(r"(\d{4,})-(\d{5,})-(\d{7,})\.json")
    found = [pattern.fullmatch(path.name) for path in folder.glob("*.json")]
    return sorted((Point(*map(int, m.groups())) for m in found if m), reverse=True)


def remove_outdated(folder: Path) -> None:
    """Keep the latest two points between experiences, and the latest two inside the last one."""
    points = stored_points(folder)
    between = [p for p in points if p.is_between][:2]
    last = between[0].experience if between else 0
    inside = [p for p in points if p > Point(last)][:2]
    for point in set(points) - {*between, *inside}:
        for suffix in (".json", ".safetensors"):
            (folder / f"{point}{suffix}").unlink(missing_ok=True)


def put_aside(folder: Path, point: Point) -> None:
    """Rename the files of a point, so that it is not used again."""
    for suffix in (".json", ".safetensors"):
        file = folder / f"{point}{suffix}"
        if file.exists():
            file.replace(file.with_name(f"{file.name}.refused"))


def _versions() -> dict[str, str]:
    """Of what makes the objects that are stored."""
    return {name: version for name, version in versions().items() if name in _DECISIVE}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
