"""Checkpoints on disk: one safetensors file each. Loading them executes nothing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from covon_avalanche.atomic_write import atomic_replace
from covon_avalanche.experiment.machine import versions

FORMAT = 2
_VERSIONED = ("covon_avalanche", "torch", "avalanche-lib")
_STATE = "state.json"


class Point(NamedTuple):
    """Where a run resumes: what comes next, all counted from 0."""

    experience: int
    epoch: int = 0
    batch: int = 0

    @property
    def is_between(self) -> bool:
        """Whether the point lies between two experiences."""
        return self == Point(self.experience)

    def file(self, folder: Path) -> Path:
        """The file of a checkpoint at this point."""
        return folder / f"{self.experience:04d}-{self.epoch:05d}-{self.batch:07d}.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one sentence."""


def save_checkpoint(
    folder: Path, point: Point, state: Mapping[str, Any], tensors: Mapping[str, Tensor], run: str
) -> None:
    """Write a file with the tensors, the state as JSON, and a checksum of both.

    :param run: identity of the run; the checkpoint is of no use to another one.
    :raises OSError: if there is no room or no permission; older checkpoints stay as they are.
    """
    about = {"format": FORMAT, "run": run, "versions": _versions()}
    text = bytearray(json.dumps({**about, "state": state}).encode())
    content = {**tensors, _STATE: torch.frombuffer(text, dtype=torch.uint8)}
    file = point.file(folder)
    with atomic_replace(file) as part:
        try:
            save_file(content, part, metadata={"checksum": _checksum(content)})
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from error


def load_checkpoint(folder: Path, point: Point, run: str) -> tuple[dict[str, Any], dict]:
    """State and tensors of a checkpoint.

    :raises CheckpointError: if it is truncated, changed, of another run or other versions.
    """
    file = point.file(folder)
    try:
        with safe_open(file, "pt") as stored:
            content = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            if stored.metadata()["checksum"] != _checksum(content):
                raise CheckpointError(f"the checkpoint {file} is damaged")
        body = json.loads(content.pop(_STATE).numpy().tobytes())
        if body["run"] != run:
            raise CheckpointError(f"the checkpoint {file} belongs to another run")
        if body["format"] != FORMAT or body["versions"] != _versions():
            made = " and ".join(f"{name} {v}" for name, v in body["versions"].items())
            raise CheckpointError(f"the checkpoint {file} was made by other versions: {made}")
        return body["state"], content
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error


def stored_points(folder: Path) -> list[Point]:
    """The points of all checkpoints in a folder, latest first."""
    pattern = re.compile(r"(\d{4,})-(\d{5,})-(\d{7,})\.safetensors")
    found = [pattern.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    return sorted((Point(*map(int, m.groups())) for m in found if m), reverse=True)


def remove_outdated(folder: Path) -> None:
    """Keep the latest two points between experiences, and the latest two inside the last one."""
    points = stored_points(folder)
    between = [p for p in points if p.is_between][:2]
    last = between[0].experience if between else 0
    inside = [p for p in points if p > Point(last)][:2]
    for point in set(points) - {*between, *inside}:
        point.file(folder).unlink(missing_ok=True)


def mark_unusable(folder: Path, point: Point) -> None:
    """Rename a checkpoint, so that it is not tried again."""
    file = point.file(folder)
    file.replace(file.with_name(f"{file.name}.unusable"))


def _versions() -> dict[str, str]:
    """Versions of the packages that define the classes of stored objects."""
    return {name: version for name, version in versions().items() if name in _VERSIONED}


def _checksum(content: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(name.encode())
        digest.update(content[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
