"""The result of one run, as it stands on disk. Nothing here imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix


class Result(BaseModel):
    """One (recipe, strategy, seed)."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    recipe: str
    strategy: str
    seed: int
    stream: Literal["test", "valid"]
    """What was evaluated; ``valid`` in the search of hyperparameters."""
    settings: dict[str, Any]
    """The resolved recipe of this run."""
    accuracy: list[list[float] | None]
    """``accuracy[t][i]``, see :class:`AccuracyMatrix`."""
    counts: list[int]
    """Images per domain in ``stream``."""
    average_accuracy: float
    """A_T, domain mean."""
    weighted_accuracy: float
    """A_T, image-weighted."""
    bwt: float | None
    calibration: dict[str, float] = {}
    """NLL (nats), Brier score and expected calibration error after the last domain, domain mean."""
    train_seconds: list[float]
    """Wall-clock seconds of training, per domain."""
    parameters: int
    parameters_worth: float
    """Tensors kept between steps, in units of the weights, see ``KeptTensors``."""
    diagnostics: list[dict[str, float]] = []
    """Of CoVON's posterior at the end of each domain, before the merge, see ``Diagnostics``."""
    versions: dict[str, str]
    machine: dict[str, Any]

    @property
    def matrix(self) -> AccuracyMatrix:
        """The accuracies with what is computed from them."""
        return AccuracyMatrix(self.counts, self.accuracy)

    def save(self, path: Path) -> None:
        """Write as JSON, replacing an older file atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what :meth:`save` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
