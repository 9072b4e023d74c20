"""The folder of a run: named by a hash of its settings, used by one process at a time.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.data_settings import data_root
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.registry.base import flat
from covon_avalanche.experiment.result import EvaluatedOn, Result, ResultError
from covon_avalanche.experiment.run_errors import run_error
from covon_avalanche.experiment.run_settings import (
    DESCRIPTIONS,
    run_hash,
    same_settings,
    settings_of,
    upgrade_settings,
    without_effect,
)
from covon_avalanche.safe_text import Printable

_log = logging.getLogger(__name__)
GivenUp = Literal["pruned", "failed"]
_LOCK_TIMEOUT = 0.5  # seconds; ``is_running`` holds the lock for a moment


class Status(BaseModel):
    """Progress of an unfinished run, or why it failed: ``status.json``."""

    domains: int = 0
    """Learned so far."""
    of_domains: int = 1
    share: float = 0.0
    """Completed fraction of the training."""
    text: Printable = ""
    """Domain, epoch and batch, and the numbers of the latest epoch."""
    accuracy: float | None = None
    """Mean accuracy on the domains learned so far."""
    error: Printable | None = None
    """Why the run failed."""
    given_up: GivenUp | None = None
    """How it ended, if it was given up before its end, as trials of a search may be."""


def find_files(folder: Path, name: str) -> list[Path]:
    """Files of this name in a folder and all below it, linked ones included; each folder once.

    :raises OSError: if a folder cannot be read.
    """
    found, seen, top = [], set[Path](), folder.resolve()
    for parent, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        real = Path(parent).resolve()
        if real in seen or real in top.parents:  # a link to a folder above, perhaps
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=lambda name: Path(parent, name).is_symlink())
        if name in files:
            found.append(Path(parent, name))
    return sorted(found)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # there are no runs, or not any more
        raise error


class RunningElsewhere(ValueError):
    """Another process is running it."""


class StoredRun:
    """Read access to the files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result_file = path / "result.json"
        self.log_file = path / "log.txt"
        self.status_file = path / "status.json"

    def result(self) -> Result | None:
        """The result of a finished run.

        :raises ResultError: if the file cannot be read or is not a result.
        """
        return Result.load(self.result_file) if self.result_file.exists() else None

    def state(self) -> tuple[str, str]:
        """``finished``, ``damaged``, ``pruned``, ``failed``, ``running``, ``interrupted`` or
        ``planned``; and its accuracy, error or progress."""
        try:
            if (result := self.result()) is not None:
                return "finished", f"A_T {100 * result.average_accuracy:.2f} %"
        except ResultError as error:
            return "damaged", str(error)
        status = self.status()
        if status.error is not None:
            return status.given_up or "failed", status.error
        unfinished = "interrupted" if self.path.exists() else "planned"
        return "running" if self.is_running() else unfinished, status.text

    def status(self) -> Status:
        """Progress of an unfinished run; an empty one before its first epoch and after its end."""
        try:
            return Status.model_validate_json(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Status()

    def data_warnings(self) -> list[str]:
        """Warnings about the data that it trains on, such as missing images."""
        with suppress(OSError, ValueError, TypeError):
            return [str(said) for said in _stored(self.path / "data.json").get("warnings", [])]
        return []

    def is_running(self) -> bool:
        """Whether a process is working on it; ``False`` in a read-only folder."""
        file = self.path / ".lock"
        if not file.exists():  # which acquiring the lock would create
            return False
        try:
            with FileLock(file).acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return False

    def own_settings(
        self, dataset_root: Path | None = None, *, moved: bool = False
    ) -> dict[str, Any] | None:
        """:func:`same_settings` by dotted key; ``None`` without a readable ``run.json``.

        :param dataset_root: of a run whose own folder of data is not on this machine, or of any
            if its data have ``moved`` there.
        """
        try:
            stored = _stored(self.path / "run.json")
            root = Path(stored.get("dataset_root", ""))
            if not moved and root.is_absolute() and root.is_dir():
                dataset_root = root
            return flat(same_settings(upgrade_settings(stored["settings"]), dataset_root))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class RunFolder(StoredRun):
    """A run of a recipe and its folder, ``RUNS/STRATEGY/seed-SEED-HASH``. An existing folder of a
    run whose settings differ only in those without effect is used again. Files in it:

    ``run.json``: settings, versions and machine; ``data.json``: numbers of images, class names,
    warnings about the data; ``log.txt``: the package's messages, a line per epoch, and the
    traceback of what stopped training; ``status.json`` and ``checkpoints``, while it is not
    finished; ``result.json``, when it is.

    :param dataset_root: the folder with the data of all streams; by default Avalanche's.
    """

    evaluated_on: EvaluatedOn = "test"
    failures: tuple[type[BaseException], ...] = (Exception, SystemExit)
    """Exceptions that end the run as failed; others leave it interrupted."""

    def __init__(
        self, runs: Path, recipe: Recipe, strategy: str, seed: int, dataset_root: Path | None = None
    ) -> None:
        self.recipe, self.strategy, self.seed = recipe, strategy, seed
        self.settings = settings_of(recipe, strategy)
        self.dataset_root = dataset_root
        own = runs / strategy / f"seed-{seed}-{run_hash(recipe, strategy, seed)}"
        super().__init__(own)
        if not self.result_file.exists():
            others = own.parent.glob(f"seed-{seed}-*")
            same = [own, *(path for path in sorted(others) if self.differences(path) == {})]
            finished = [path for path in same if (path / "result.json").exists()]
            begun = [path for path in same if path.exists()]
            super().__init__([*finished, *begun, own][0])
        self.hash = self.path.name.rpartition("-")[2]
        self.checkpoint_folder = self.path / "checkpoints"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.strategy}, seed {self.seed}"

    def on_domain(self, domains: int, accuracy: float) -> None:
        """Called after each domain with the mean accuracy on those learned so far; what it raises
        ends the run."""

    def gives_up(self, error: BaseException) -> GivenUp | None:
        """How the run ends with an error, if it is not to be repeated."""
        return None

    def differences(self, other: Path, *, moved: bool = False) -> dict[str, tuple[Any, Any]] | None:
        """The settings that differ in another run's folder: its value and this run's by dotted
        key, or ``"unset"``. ``None`` if the folder has no readable ``run.json``.

        :param moved: see :meth:`own_settings`.
        """
        if (theirs := StoredRun(other).own_settings(self.dataset_root, moved=moved)) is None:
            return None
        ours = flat(same_settings(self.settings, self.dataset_root))
        # compared as JSON, where true is not 1
        texts = [{k: json.dumps(own[k], sort_keys=True) for k in own} for own in (ours, theirs)]
        keys = [k for k in ours | theirs if len({text.get(k) for text in texts}) > 1]
        return {key: (theirs.get(key, "unset"), ours.get(key, "unset")) for key in keys}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, keep other processes out, remove what a killed one was writing, and
        note the error that ends the run.

        :raises RunningElsewhere: if another process is running it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT)
        except Timeout:
            raise RunningElsewhere(
                f"another process is running {self.path}: wait until it finishes or stop it, then "
                "run the command again"
            ) from None
        try:
            for part in self.path.rglob(".*.part"):
                part.unlink(missing_ok=True)
            yield
        except self.failures as error:
            self.write_failure(run_error(error), self.gives_up(error))
            raise
        finally:
            lock.release()

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Write the package's messages, warnings, and the exception that ends the run to the
        log."""
        handler = logging.FileHandler(self.log_file, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        package, python = logging.getLogger("covon_avalanche"), logging.getLogger("py.warnings")
        before = package.level
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        python.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        except self.failures:
            _log.exception("the run stopped")
            raise
        finally:
            logging.captureWarnings(False)
            python.removeHandler(handler)
            package.removeHandler(handler)
            package.setLevel(before)
            handler.close()

    def result(self, *, store: bool = False) -> Result | None:
        """The result of a finished run, under the recipe's current name, title, list of searched
        strategies and settings without effect.

        :param store: also write these; otherwise nothing is written.
        :raises ResultError: if the file cannot be read, or is not a result of this run.
        """
        if not self.result_file.exists():
            return None
        try:
            result = Result.load(self.result_file)
        except ResultError as error:
            if isinstance(error.__cause__, OSError):  # such as a lack of permission
                raise
            raise ResultError(f"{error}; remove it to run it again") from error
        found = result.run_hash or self.hash, result.strategy, result.seed, result.stream
        if found != (self.hash, self.strategy, self.seed, self.evaluated_on):
            raise ResultError(
                f"{self.result_file} is of another run ({result.strategy}, seed {result.seed}, "
                f"{result.stream}, hash {result.run_hash}); remove it to run this one"
            )
        keys = *DESCRIPTIONS, *without_effect(self.settings), "stream", "model"
        now = {key: self.settings[key] for key in keys}
        if result.recipe != self.recipe.name or not now.items() <= result.settings.items():
            changes = {"recipe": self.recipe.name, "settings": result.settings | now}
            result = result.model_copy(update=changes)
            if store:
                result.save(self.result_file)
        return result

    @property
    def starts(self) -> int:
        """How often it was started."""
        return int(_stored(self.path / "run.json").get("starts", 0))

    def write_start(self, about: dict[str, Any]) -> int:
        """Write ``run.json``, and return how often the run was started, this time included."""
        self.status_file.unlink(missing_ok=True)
        starts = 1 + self.starts
        root = str(data_root(self.dataset_root).resolve())
        about = {"settings": self.settings, "dataset_root": root, **about, "starts": starts}
        write_atomically(self.path / "run.json", json.dumps(about, indent=1) + "\n")
        return starts

    def write_status(self, status: Status) -> None:
        write_atomically(self.status_file, status.model_dump_json() + "\n")

    def write_failure(self, error: str, given_up: GivenUp | None = None) -> None:
        """Store in ``status.json`` why the run failed."""
        failure = {"error": error, "given_up": given_up}
        with suppress(OSError):
            self.write_status(self.status().model_copy(update=failure))

    def write_result(self, result: Result) -> None:
        """Write ``result.json``, and remove what only an unfinished run needs."""
        result.save(self.result_file)
        for file in [*self.checkpoint_folder.glob("*"), self.status_file]:
            file.unlink(missing_ok=True)

    def check_data(self, data: dict[str, list[Any]], said: Sequence[str] = ()) -> None:
        """Write ``data.json``, or compare with it if there is a checkpoint.

        :param data: numbers of images by stream and domain, and the ``classes`` by id, which runs
            of earlier versions lack.
        :param said: warnings about the data, which are not compared.
        :raises ValueError: if the data have changed since the run was started.
        """
        file = self.path / "data.json"
        if any(self.checkpoint_folder.glob("*.pt")):
            stored = _stored(file).items()
            before = {k: v for k, v in stored if k != "warnings" and v != data.get(k)}
            if before:
                now = {key: data.get(key) for key in before}
                raise ValueError(
                    f"the data have changed since {self.path} was started: it had {before}, "
                    f"now there are {now}; remove the folder or choose another --out"
                )
        write_atomically(file, json.dumps({**data, "warnings": said}))


def _stored(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or an empty one.

    :raises ValueError: naming a damaged file.
    """
    with suppress(ValueError, RecursionError):
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if isinstance(content, dict):
            return content
    raise ValueError(f"{file} is damaged: remove it, then run the command again")


def run_folders(recipe: Recipe, runs: Path, dataset_root: Path | None = None) -> list[RunFolder]:
    """All runs of a recipe, seed by seed, in the folder ``runs``."""
    return [
        RunFolder(runs, recipe, name, seed, dataset_root)
        for seed in recipe.seeds
        for name in recipe.strategies
    ]


def other_data(folders: Sequence[RunFolder]) -> str | None:
    """A sentence, if runs with the same settings as these, perhaps with other seeds, used data or
    weights of the same names in another folder, which is still there."""
    for folder in {folder.strategy: folder for folder in folders}.values():
        for file in folder.path.parent.glob("seed-*-*/run.json"):
            if folder.differences(file.parent, moved=True) == {}:
                for was, now in (folder.differences(file.parent) or {}).values():
                    return f"{file.parent} used {was}, not {now}: choose another --out"
    return None


def _shown(value: object) -> str:
    """The value as text; an empty one as quotes, which can be seen."""
    return str(value) or '""'


def distinct_settings(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each of some settings by dotted key those in which they differ, such as ``epochs 5``;
    nothing of empty ones."""
    values = {key: {repr(own.get(key)) for own in found if own} for key in chain(*found)}
    keys = [key for key, different in values.items() if len(different) > 1]
    return [
        ", ".join(
            f"{k.removeprefix('strategy.')} {_shown(own.get(k, 'unset'))}" for k in keys if own
        )
        for own in found
    ]


def other_settings(folders: Sequence[RunFolder]) -> list[str]:
    """How finished runs of the same strategies differ from these of one recipe, a sentence for each
    difference."""
    found = Counter[tuple[str, str]]()
    for folder in {folder.strategy: folder for folder in folders}.values():
        for file in folder.path.parent.glob("seed-*-*/result.json"):
            changes = [
                f"{key.removeprefix('strategy.')}: {_shown(was)}, now {_shown(now)}"
                for key, (was, now) in (folder.differences(file.parent) or {}).items()
            ]
            more = [f"{len(changes) - 2} more"] * (len(changes) > 2)
            if changes:
                found[folder.strategy, "; ".join(changes[:2] + more)] += 1
    return [
        f"{n} finished run{'s' * (n > 1)} of {name} differ{'s' * (n == 1)} in {changes}"
        for (name, changes), n in found.items()
    ]


def finished_runs(
    recipe: Recipe, runs: Path, dataset_root: Path | None = None, *, store: bool = False
) -> list[Result]:
    """The results of a recipe's strategies with its settings in a folder of runs, all seeds;
    damaged ones are left out with a warning.

    :param store: see :meth:`RunFolder.result`.
    """
    found = []
    for strategy in recipe.strategies:
        seeds = {path.name.split("-")[1] for path in (runs / strategy).glob("seed-*-*")}
        for seed in sorted(int(seed) for seed in seeds if seed.isdecimal()):
            folder = RunFolder(runs, recipe, strategy, seed, dataset_root)
            try:
                found.append(folder.result(store=store))
            except ResultError as error:
                _log.warning("%s; it is left out", error)
    return [result for result in found if result is not None]
