"""The folder of a run: named by what decides its result, used by one process at a time.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Epoch, Result, ResultError

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT = 0.5  # seconds; ``is_running`` holds the lock for a moment


def settings_of(recipe: Recipe, strategy: str) -> dict[str, Any]:
    """The part of a recipe that one of its strategies uses, without what is not set."""
    unused = {"strategies", "seeds", "search"}
    whole = recipe.model_dump(mode="json", exclude=unused, exclude_none=True)
    own = recipe.strategies[strategy].model_dump(mode="json", exclude_none=True)
    return {**whole, "strategy": own}


def settings_today(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stored result in the current schema, with the defaults of newer settings.
    Settings that are not valid (any more) are returned unchanged."""
    one = {"seeds": [0], "strategies": {"it": stored["strategy"]}}
    whole = {key: value for key, value in stored.items() if key != "strategy"}
    try:
        return settings_of(Recipe.model_validate({**whole, **one}), "it")
    except ValidationError:
        return stored


def decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide a result: no names."""
    return {key: value for key, value in settings.items() if key not in ("name", "title")}


def run_hash(recipe: Recipe, strategy: str, seed: int) -> str:
    """Ten hexadecimal digits of all that decides a result: the settings and the seed, but no
    names, no other strategies and no versions."""
    text = json.dumps([decisive(settings_of(recipe, strategy)), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Status(BaseModel):
    """How far an unfinished run is, or why it failed: ``status.json``."""

    domains: int = 0
    """Learned so far."""
    of_domains: int = 1
    accuracy: float | None = None
    """Mean over the domains learned."""
    epoch: Epoch | None = None
    """The latest."""
    of_epochs: int = 1
    error: str | None = None
    """Why the run failed."""

    @property
    def share(self) -> float:
        """Fraction of all epochs that is done."""
        done = float(self.domains)
        if self.epoch is not None:
            within = (self.epoch.epoch + 1) / max(1, self.of_epochs)
            done = max(done, self.epoch.experience + within)
        return min(1.0, done / self.of_domains)

    def __str__(self) -> str:
        if self.epoch is None:
            return ""
        return (
            f"domain {self.epoch.experience + 1}/{self.of_domains}, "
            f"epoch {self.epoch.epoch + 1}/{self.of_epochs}, loss {self.epoch.loss:.3f}, "
            f"accuracy {100 * self.epoch.accuracy:.1f} %, "
            f"{self.epoch.images / max(1e-9, self.epoch.seconds):,.0f} images/s"
        )


def error_sentence(error: BaseException) -> tuple[str, bool]:
    """What an error says, and whether the user's input caused it."""
    bad_input = isinstance(error, ValueError | OSError)
    name = "" if bad_input else f"{type(error).__name__}: "
    return name + (" ".join(str(error).split()) or "no reason given"), bad_input


class StoredRun:
    """The files of a run, to read them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result_file = path / "result.json"
        self.log_file = path / "log.txt"
        self.status_file = path / "status.json"

    def status(self) -> Status | None:
        """How far an unfinished run is; ``None`` before its first epoch and after its end."""
        try:
            return Status.model_validate_json(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def is_running(self) -> bool:
        """Whether a process works on it."""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False


class RunFolder(StoredRun):
    """``RUNS/STRATEGY/seed-SEED-HASH`` with

    ``run.json``: settings, versions and machine; ``data.json``: of images, what they were;
    ``log.txt``: the package's messages, and the traceback of what stopped the run;
    ``metrics.jsonl``: one line per epoch; ``status.json`` and ``checkpoints``, while it is not
    finished; ``result.json``, when it is.
    """

    def __init__(self, runs: Path, recipe: Recipe, strategy: str, seed: int) -> None:
        self.hash = run_hash(recipe, strategy, seed)
        super().__init__(runs / strategy / f"seed-{seed}-{self.hash}")
        self.checkpoint_folder = self.path / "checkpoints"
        self.settings = settings_of(recipe, strategy)
        self.names = {key: self.settings[key] for key in ("name", "title")}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, keep other processes out, and log messages, warnings and the error
        that ends the run.

        :raises ValueError: if another process works in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT)
        except Timeout:
            raise ValueError(f"another process works on {self.path}") from None
        try:
            self.remove_partial_files()
            with _logged(self.log_file):
                yield
        except (Exception, SystemExit) as error:
            self.write_failure(error_sentence(error)[0])
            raise
        finally:
            lock.release()

    def remove_partial_files(self) -> None:
        """Remove what a killed process was writing."""
        for part in self.path.rglob(".*.part"):
            part.unlink(missing_ok=True)

    def result(self) -> Result | None:
        """The result of a finished run. A damaged file is renamed, and the run is not finished.

        :raises ResultError: if it cannot be read or renamed, or is of a newer version.
        """
        try:
            return Result.load(self.result_file)
        except ResultError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            if not error.damaged:
                raise
            _log.warning("%s; it is run again", error)
        try:
            self.result_file.replace(self.result_file.with_suffix(".damaged"))
        except OSError as error:
            raise ResultError(
                f"{self.result_file} is no result and cannot be put aside: {error.strerror}"
            ) from error
        return None

    def is_named_as(self, result: Result) -> bool:
        """Whether a stored result has the recipe's current name and title."""
        return result.recipe == self.names["name"] and self.names.items() <= result.settings.items()

    def renamed(self, result: Result) -> Result:
        """The stored result under the current names, which do not decide the folder."""
        if not self.is_named_as(result):
            changes = {"recipe": self.names["name"], "settings": result.settings | self.names}
            result = result.model_copy(update=changes)
            result.save(self.result_file)
        return result

    def write_start(self, about: dict[str, Any]) -> int:
        """Write ``run.json``.

        :return: how often the run was started, this time included.
        """
        self.status_file.unlink(missing_ok=True)
        file = self.path / "run.json"
        try:
            starts = 1 + int(json.loads(file.read_text(encoding="utf-8"))["starts"])
        except (OSError, ValueError, KeyError, TypeError):
            starts = 1
        about = {"settings": self.settings, **about, "starts": starts}
        write_atomically(file, json.dumps(about, indent=1) + "\n")
        return starts

    def write_epochs(self, epochs: list[dict[str, Any]]) -> None:
        """``metrics.jsonl``."""
        lines = "".join(json.dumps(epoch) + "\n" for epoch in epochs)
        write_atomically(self.path / "metrics.jsonl", lines)

    def write_status(self, status: Status) -> None:
        """``status.json``."""
        write_atomically(self.status_file, status.model_dump_json() + "\n")

    def write_failure(self, error: str) -> None:
        """Keep in ``status.json`` why the run failed."""
        with suppress(OSError):
            self.write_status((self.status() or Status()).model_copy(update={"error": error}))

    def write_result(self, result: Result) -> None:
        """``result.json``; the run is finished."""
        result.save(self.result_file)
        for file in [*self.checkpoint_folder.glob("*"), self.status_file]:
            file.unlink(missing_ok=True)

    def check_data(self, data: dict[str, str]) -> None:
        """Write ``data.json``, or compare with it if there is a checkpoint.

        :param data: see :func:`data_fingerprint`.
        :raises ValueError: if the data have changed since the run was begun.
        """
        file = self.path / "data.json"
        before = data
        if any(self.checkpoint_folder.glob("*.json")):
            with suppress(OSError, ValueError):
                before = dict(json.loads(file.read_text(encoding="utf-8")))
        for name in [*before, *data]:
            then, now = before.get(name, "none"), data.get(name, "none")
            if then != now:
                raise ValueError(
                    f"{self.path} was begun with other data: {name} were {then} and are {now} now; "
                    "remove the folder or choose another --out"
                )
        if data:
            write_atomically(file, json.dumps(data, indent=1) + "\n")


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Write into a file what the package logs, warnings, and the exception that ends it."""
    package = logging.getLogger("covon_avalanche")
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level, show = package.level, warnings.showwarning

    def log_and_show(
        message: Warning | str, category: type[Warning], *where: Any, **more: Any
    ) -> None:
        _log.warning("%s: %s", category.__name__, message)
        show(message, category, *where, **more)

    package.addHandler(handler)
    package.setLevel(logging.INFO)
    warnings.showwarning = log_and_show
    try:
        yield
    except (Exception, SystemExit):
        _log.exception("the run stopped")
        raise
    finally:
        warnings.showwarning = show
        package.removeHandler(handler)
        package.setLevel(level)
        handler.close()
