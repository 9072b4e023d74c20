"""The folder of a run: named by what decides its result, used by one process at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result, ResultError

_log = logging.getLogger(__name__)


def settings_of(recipe: Recipe, strategy: str) -> dict[str, Any]:
    """The part of a recipe that one of its strategies uses, without what is not set."""
    unused = {"strategies", "seeds", "search"}
    whole = recipe.model_dump(mode="json", exclude=unused, exclude_none=True)
    own = recipe.strategies[strategy].model_dump(mode="json", exclude_none=True)
    return {**whole, "strategy": own}


def settings_today(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stored result as :func:`settings_of` gives them: with the defaults of what
    has become known since. Those that are not valid (any more) stay as they are."""
    one = {"seeds": [0], "strategies": {"it": stored["strategy"]}}
    whole = {key: value for key, value in stored.items() if key != "strategy"}
    try:
        return settings_of(Recipe.model_validate({**whole, **one}), "it")
    except ValidationError:
        return stored


def decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that decide a result: no names."""
    return {key: value for key, value in settings.items() if key not in ("name", "title")}


def run_hash(recipe: Recipe, strategy: str, seed: int) -> str:
    """Ten hexadecimal digits of all that decides a result: the settings and the seed, but no
    names, no other strategies and no versions."""
    text = json.dumps([decisive(settings_of(recipe, strategy)), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class RunFolder:
    """``RUNS/STRATEGY/seed-SEED-HASH`` with

    ``run.json``: settings, versions and machine; ``data.json``: of images, what they were;
    ``log.txt``; ``metrics.jsonl``: one line per epoch; ``checkpoints``, emptied at the end;
    ``result.json``: there when the run is finished.
    """

    def __init__(self, runs: Path, recipe: Recipe, strategy: str, seed: int) -> None:
        self.hash = run_hash(recipe, strategy, seed)
        self.recipe = recipe.name
        self.path = runs / strategy / f"seed-{seed}-{self.hash}"
        self.settings = settings_of(recipe, strategy)

    @property
    def checkpoints(self) -> Path:
        """Where to go on from."""
        return self.path / "checkpoints"

    @property
    def result_file(self) -> Path:
        """The result."""
        return self.path / "result.json"

    @property
    def log_file(self) -> Path:
        """The package's messages, and the traceback of what stopped the run."""
        return self.path / "log.txt"

    def result(self) -> Result | None:
        """The result of a finished run. A file that is not one is put aside and made anew.

        :raises ResultError: if it cannot be read or put aside, or is of a newer version.
        """
        try:
            return Result.load(self.result_file)
        except ResultError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None  # not finished
            if not error.damaged:
                raise
            _log.warning("%s; it is run again", error)
        self._put_aside()
        return None

    def under_names_of_today(self, result: Result) -> Result:
        """Names do not decide the folder: those that the result has may be older."""
        names = {key: self.settings[key] for key in ("name", "title")}
        return result.model_copy(
            update={"recipe": self.recipe, "settings": result.settings | names}
        )

    def _put_aside(self) -> None:
        """Under a name that none before it has."""
        names = (self.result_file.with_suffix(f".damaged-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            self.result_file.replace(aside)
        except OSError as error:
            raise ResultError(
                f"{self.result_file} is no result and cannot be put aside: {error.strerror}"
            ) from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, keep others out, and write the package's messages to ``log.txt``,
        warnings too.

        :raises ValueError: if another process works in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another process works on {self.path}") from None
        try:
            with _logged(self.log_file):
                yield
        finally:
            lock.release()

    def write_start(self, about: dict[str, Any]) -> int:
        """Write ``run.json``.

        :return: how often the run was started, this time included.
        """
        file = self.path / "run.json"
        try:
            starts = 1 + int(json.loads(file.read_text(encoding="utf-8"))["starts"])
        except (OSError, ValueError, KeyError, TypeError):
            starts = 1
        about = {"settings": self.settings, **about, "starts": starts}
        write_atomically(file, json.dumps(about, indent=1) + "\n")
        return starts

    def check_data(self, data: dict[str, str]) -> None:
        """Write ``data.json``, if there is nothing to go on from; else compare with it.

        :param data: see :func:`data_fingerprint`.
        :raises ValueError: if the data have changed since the run was begun.
        """
        file = self.path / "data.json"
        before = data
        if any(self.checkpoints.glob("*.json")):
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

    def write_epochs(self, epochs: list[dict[str, Any]]) -> None:
        """``metrics.jsonl``."""
        lines = "".join(json.dumps(epoch) + "\n" for epoch in epochs)
        write_atomically(self.path / "metrics.jsonl", lines)


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
