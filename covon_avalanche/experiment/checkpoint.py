"""Checkpoint files, read with ``torch.load(weights_only=True)``, which runs no code."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.machine import versions
from covon_avalanche.experiment.state import Node, StateError

FORMAT = 6
_VERSIONED = ("covon_avalanche", "torch", "avalanche-lib")


class Point(NamedTuple):
    """Where a run resumes: the next experience, epoch and batch, counted from 0."""

    experience: int
    epoch: int = 0
    batch: int = 0

    @property
    def is_between(self) -> bool:
        """Whether the point lies between two experiences."""
        return self == Point(self.experience)

    def file(self, folder: Path) -> Path:
        """The file of a checkpoint at this point."""
        return folder / f"{self.experience:04d}-{self.epoch:05d}-{self.batch:07d}.pt"


def save_checkpoint(folder: Path, point: Point, state: Any, run: str) -> None:
    """Write a checkpoint, and keep the latest two between experiences and the latest two inside
    the last one.

    :param state: the result of :func:`~covon_avalanche.experiment.state.capture`.
    :param run: identity of the run; the checkpoint is of no use to another one.
    :raises StateError: if torch cannot store it.
    :raises OSError: if the file cannot be written; older checkpoints remain unchanged.
    """
    content = io.BytesIO()
    about = {"format": FORMAT, "run": run, "versions": _versions()}
    try:
        torch.save({**about, "state": state}, content)
    except Exception as error:  # such as two dtypes in one memory
        raise StateError(f"the state cannot be stored: {error}") from error
    write_atomically(point.file(folder), content.getvalue())
    points = stored_points(folder)
    between = [p for p in points if p.is_between][:2]
    last = between[0].experience if between else 0
    inside = [p for p in points if p > Point(last)][:2]
    for outdated in set(points) - {*between, *inside}:
        outdated.file(folder).unlink(missing_ok=True)


def load_checkpoint(folder: Path, point: Point, run: str) -> Any:
    """The state of a checkpoint.

    :raises StateError: if it is changed, of another run or other versions.
    :raises Exception: of any type, if the file is truncated.
    """
    file = point.file(folder)
    with ZipFile(file) as archive:
        if archive.testzip() is not None:
            raise StateError(f"the checkpoint {file} is damaged")
    with torch.serialization.safe_globals([Node]):
        body = torch.load(file, weights_only=True)
    if body["run"] != run:
        raise StateError(f"the checkpoint {file} belongs to another run")
    if body["format"] != FORMAT or body["versions"] != _versions():
        made = " and ".join(f"{name} {v}" for name, v in body["versions"].items())
        raise StateError(f"the checkpoint {file} was made by other versions: {made}")
    return body["state"]


def stored_points(folder: Path) -> list[Point]:
    """The points of all checkpoints in a folder, latest first."""
    pattern = re.compile(r"(\d{4,})-(\d{5,})-(\d{7,})\.pt")
    found = [pattern.fullmatch(path.name) for path in folder.glob("*.pt")]
    return sorted((Point(*map(int, m.groups())) for m in found if m), reverse=True)


def _versions() -> dict[str, str]:
    """Versions of the packages that define the classes of stored objects."""
    return {name: version for name, version in versions().items() if name in _VERSIONED}
