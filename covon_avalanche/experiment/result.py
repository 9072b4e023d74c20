"""The result of one run, as stored on disk. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.safe_text import Printable

SCHEMA = 2
EvaluatedOn = Literal["test", "valid"]


class ResultError(ValueError):
    """A file that is not a result, or conflicting results; one sentence."""


def first_error(error: ValidationError) -> str:
    """The first of pydantic's errors: where it is, unless that is the whole, and what is wrong."""
    first = error.errors()[0]
    where, what = ".".join(map(str, first["loc"])), what_is_wrong(first)
    return f"{where}: {what}" if where else what


def what_is_wrong(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in words for a user of TOML or JSON."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "union_tag_invalid":
        names = re.findall(r"'([^']+)'", context["expected_tags"])
        return f"is unknown; known are {', '.join(names)}{did_you_mean(context['tag'], names)}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return "must be a table"
    if kind == "extra_forbidden":
        return "unknown key"
    return str(error["msg"]).removeprefix("Value error, ")


class Epoch(BaseModel):
    """Training in one epoch."""

    model_config = ConfigDict(extra="forbid")

    experience: int
    epoch: int
    """Index within the experience; both count from 0."""
    loss: float
    """The loss of the strategy: mean over the images. It has the terms that methods add to the loss
    (LwF, DER), not the penalties whose gradient alone is added (EWC, SI, MAS, RWalk)."""
    accuracy: float
    """On the training batches, by the weights of each step (posterior samples of CoVON and VCL)."""
    images: int
    seconds: float


class Result(BaseModel):
    """The result of a strategy of a recipe with a seed."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    schema_version: Literal[2] = 2
    run_hash: str = ""
    """Hash of the settings and the seed, see :func:`run_hash`."""
    recipe: Printable
    strategy: Printable
    seed: int
    stream: EvaluatedOn
    """The evaluated stream; ``valid`` in the search of hyperparameters."""
    settings: dict[str, Any]
    """The resolved recipe of this run."""
    accuracy: list[list[float] | None]
    """``accuracy[t][i]``, see :class:`AccuracyMatrix`."""
    counts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """Images per domain in ``stream``."""
    held_out: bool = False
    """Whether the domains of ``stream`` are never trained on (CORe50's test sessions)."""
    average_accuracy: float
    """A_T, domain mean."""
    weighted_accuracy: float
    """A_T, pooled over the images of all domains."""
    bwt: float | None
    """Backward transfer, the paper's F_T."""
    calibration: dict[str, float] = {}
    """NLL (nats), Brier score and expected calibration error after the last domain, domain mean."""
    class_accuracy: dict[str, float] = {}
    """Accuracy by class after the last domain, over the images of all domains."""
    sampled: dict[str, float] = {}
    """``average_accuracy`` and calibration with the mean of ``posterior_samples`` predictions."""
    epochs: list[Epoch] = []
    train_seconds: list[float]
    """Wall-clock seconds of training, per domain."""
    parameters: int
    memory_ratio: float
    """Tensors kept between steps, in units of the weights, see ``MemoryFootprint``."""
    memory_by_domain: list[float] = []
    """The same per domain."""
    peak_memory: int | None = None
    """Bytes of the process, or of the accelerator where there is one."""
    resumed: int = 0
    """How often the run was resumed after an interruption."""
    diagnostics: list[dict[str, float]] = []
    """Diagnostics of CoVON's posterior at the end of each domain, before the merge."""
    versions: dict[str, str]
    machine: dict[str, Any]
    checked: bool = Field(default=True, exclude=True)
    """Whether a checksum shows that it is as it was stored; earlier versions stored none."""

    @model_validator(mode="after")
    def _coherent(self) -> Result:
        """Check what tables and figures rely on."""
        strategy = self.settings.get("strategy")
        if not isinstance(strategy, dict) or not isinstance(strategy.get("kind"), str):
            raise ValueError("settings.strategy.kind is missing")
        if not isinstance(self.settings.get("stream", {}), dict):
            raise ValueError("settings.stream must be a table")
        rows, domains = self.accuracy, len(self.counts)
        last = bool(rows) and rows[-1] is not None
        fits = all(len(row) == domains for row in rows if row is not None)
        if not (last and fits and (self.held_out or len(rows) == domains)):
            raise ValueError(f"accuracy = {rows} does not fit counts = {self.counts}")
        if any(a < 0 or a > 1 for row in rows if row is not None for a in row):
            raise ValueError(f"accuracies must be in [0, 1], got {rows}")
        return self

    @property
    def matrix(self) -> AccuracyMatrix:
        """The accuracies, and the metrics computed from them."""
        return AccuracyMatrix(self.counts, self.accuracy, self.held_out)

    def save(self, path: Path) -> None:
        """Write as JSON, replacing an older file atomically."""
        write_atomically(path, self.to_json(indent=1) + "\n")

    def to_json(self, indent: int | None = None) -> str:
        """JSON for :meth:`parse`: fields and checksum, unless it was loaded without one."""
        text = self.model_dump_json(indent=indent)
        end = f',"checksum":"{_checksum(text)}"}}'
        return text.removesuffix("}").rstrip() + end if self.checked else text

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what :meth:`save` wrote.

        :raises ResultError: naming the file and what is wrong with it.
        """
        try:
            return cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ResultError(f"{path} cannot be read: {error.strerror}") from error

    @classmethod
    def parse(cls, text: str | bytes, name: str) -> Result:
        """A result from JSON.

        :raises ResultError: that begins with ``name``, and says what is wrong.
        """
        try:
            data = json.loads(text)
            version, checksum = data["schema_version"], data.pop("checksum", None)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ResultError(
                f"{name} is not a result: it is not JSON with a schema_version"
            ) from None
        if isinstance(version, int) and version > SCHEMA:
            raise ResultError(
                f"{name} has schema {version}, of a newer version of this package, which knows "
                f"{SCHEMA}"
            )
        if checksum not in (None, _checksum(text)):
            raise ResultError(f"{name} was changed after it was stored: its checksum differs")
        try:
            result = cls.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise ResultError(f"{name} is not a result: {first_error(error)}") from error
        result.checked = checksum is not None
        return result


def _checksum(text: str | bytes) -> str:
    """Hash of all values of a JSON object but the checksum, whatever its layout: 1 is 1.0."""
    values = json.loads(text, parse_int=float)
    values.pop("checksum", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
