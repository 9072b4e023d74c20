"""Stored results as a pandas DataFrame, one row per run. Nothing here imports torch."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.experiment.data_settings import published
from covon_avalanche.experiment.registry import stored_strategy
from covon_avalanche.experiment.registry.base import flat
from covon_avalanche.experiment.result import Epoch, Result, ResultError
from covon_avalanche.experiment.run_folder import StoredRun, find_files
from covon_avalanche.experiment.run_settings import (
    WITHOUT_EFFECT,
    result_settings,
    upgrade_settings,
)
from covon_avalanche.safe_text import printable

_log = logging.getLogger(__name__)
_FILES = "run.json", "result.json"  # of a run; the second, if it is finished
_CALIBRATION = ("nll", "brier", "ece")
_SAMPLED = tuple(f"sampled_{name}" for name in ("average_accuracy", *_CALIBRATION))
_MATRIX = ("incremental_accuracy", "forgetting", "max_forgetting", "plasticity", "forward_transfer")
MEASURES = (  # columns of measured numbers
    *("average_accuracy", "weighted_accuracy", "bwt", *_MATRIX),
    *(*_CALIBRATION, *_SAMPLED, "train_seconds", "time_growth", "memory_growth"),
)


def load_results(*paths: str | Path) -> pd.DataFrame:
    """Load finished runs into a DataFrame with one row per run.

    Accuracies are fractions in [0, 1]; numbers that a run does not define are NaN.

    ======================== ==========================================================
    ``recipe``, ``title``    name and title of the recipe
    ``strategy``, ``kind``   name in the recipe and kind of strategy
    ``seed``, ``stream``     random seed and name of the stream
    ``evaluated``            ``test`` or ``valid``
    ``offline``              trains on several domains at once; not a continual learner
    ``replay``               stores training examples of earlier domains
    ``untuned``              settings not searched, unlike those of others in the recipe
    ``trials``               of the search of its settings, without those that extended its
                             grid; NaN if unknown
    ``at_end``               settings whose best value was at an end of what was tried
    ``still_falling``        whether the training loss was, at the end of a domain
    ``checked``              has a checksum, which results of earlier versions lack
    ``average_accuracy``     A_T, domain mean: mean over domains after the last one
    ``weighted_accuracy``    A_T, pooled over the images of all domains
    ``incremental_accuracy`` mean over time of A_t, the domain mean over domains so far
    ``bwt``, ``forgetting``  backward transfer, and its negative
    ``max_forgetting``       best earlier accuracy minus the last, mean over past domains
    ``plasticity``           mean accuracy on a domain right after it was learned
    ``forward_transfer``     mean accuracy on domains that are not learned yet
    ``nll``                  negative log-likelihood after the last domain, nats
    ``brier``, ``ece``       Brier score in [0, 2]; expected calibration error in [0, 1]
    ``sampled_*``            average_accuracy, nll, brier and ece with posterior samples
    ``train_seconds``        wall-clock training time of all domains, seconds
    ``time_growth``          training time of the last domain relative to the second
    ``memory_growth``        the same of the memory kept between steps
    ``settings.*``           the settings by dotted name: ``settings.strategy.lr``; absolute
                             paths as ``NAME@DIGEST``
    ======================== ==========================================================

    The other columns are the fields of the same name of a
    :class:`~covon_avalanche.experiment.result.Result`, such as ``settings`` (resolved, nested) and
    ``accuracy`` (see :func:`accuracy_matrix`).

    :param paths: folders of runs (damaged and unfinished ones are left out with a warning),
        ``result.json`` files, or ``.jsonl`` files with one result per line. A run found twice is
        loaded once.
    :raises ResultError: naming a missing path, a damaged file or two results of the same run that
        differ, or if no finished run is found.
    """
    return results_frame(read_results([Path(path) for path in paths]))


def accuracy_matrix(run: Mapping[str, Any] | pd.Series) -> AccuracyMatrix:
    """The accuracy matrix of a row of :func:`load_results`."""
    return AccuracyMatrix(run["counts"], run["accuracy"], run["held_out"])


def results_frame(results: Iterable[Result]) -> pd.DataFrame:
    """The DataFrame of :func:`load_results` from results in memory."""
    table = pd.DataFrame([_row(result) for result in results])
    measured = [name for name in (*MEASURES, "peak_memory") if name in table]  # none of no results
    return table.astype(dict.fromkeys(measured, float))  # None is NaN


def _row(result: Result) -> dict[str, Any]:
    settings = published(upgrade_settings(result.settings))
    if "precision" in result.machine:  # in use, where the recipe says "auto"
        settings["precision"] = result.machine["precision"]
    strategy = stored_strategy(settings["strategy"])
    if not strategy.has_probabilities:
        result = result.model_copy(update={"calibration": {}})
    searched = settings.get("searched") or {}
    search = searched.get(result.strategy, {}) if isinstance(searched, dict) else {}
    shown = {key: value for key, value in settings.items() if key != "searched"}
    measured = result.calibration | {f"sampled_{k}": v for k, v in result.sampled.items()}
    return {
        **result.model_dump(exclude={"schema_version", "calibration", "sampled"}),
        "title": printable(str(settings.get("title", result.recipe))),
        "kind": strategy.kind,
        "stream": str(settings.get("stream", {}).get("name", "unknown stream")),
        "evaluated": result.stream,
        "checked": result.checked,
        "offline": bool(strategy.offline),
        "replay": bool(strategy.stores_examples),
        "untuned": bool(searched) and result.strategy not in searched,
        "trials": search.get("trials", math.nan) - search.get("extensions", 0),
        "at_end": search.get("at_end", []),
        "still_falling": _still_falling(result.epochs),
        **{name: getattr(result.matrix, name)() for name in _MATRIX},
        **{name: measured.get(name, math.nan) for name in (*_CALIBRATION, *_SAMPLED)},
        "train_seconds": sum(result.train_seconds),
        "time_growth": _growth(result.train_seconds),
        "memory_growth": _growth(result.memory_by_domain),
        "settings": settings,
        **{f"settings.{key}": value for key, value in flat(shown).items()},
    }


def _growth(by_domain: Sequence[float]) -> float:
    """The last relative to the second, because the first has no anchors and compiles; NaN for fewer
    than three domains."""
    return by_domain[-1] / by_domain[1] if len(by_domain) > 2 and by_domain[1] else math.nan


def _still_falling(epochs: Sequence[Epoch]) -> bool:
    """Whether more than a tenth of a domain's decrease of the training loss came in the last fifth
    of its epochs, of which there are at least five, in the median over the domains."""
    losses: dict[int, list[float]] = {}
    for epoch in epochs:
        losses.setdefault(epoch.experience, []).append(epoch.loss)
    shares = []
    for loss in losses.values():
        start = len(loss) - len(loss) // 5 - 1
        if len(loss) >= 5 and loss[0] > loss[-1]:
            shares.append((loss[start] - loss[-1]) / (loss[0] - loss[-1]))
    return bool(shares) and median(shares) > 0.1


def read_results(paths: Sequence[Path]) -> list[Result]:
    """The results in files and below folders, each run once; see :func:`load_results`."""
    found: dict[str, tuple[str, str, Result]] = {}
    for path in paths:
        for source, result in _read(path):
            try:
                own = result_settings(_row(result)["settings"])
            except Exception as error:  # settings of unknown versions may have any content
                raise ResultError(f"{source} has settings that cannot be read: {error}") from error
            # The hash of a run includes what has no effect.
            settings = {k: v for k, v in own.items() if k not in WITHOUT_EFFECT}
            run = [result.recipe, result.strategy, result.seed, result.stream, settings]
            # Compared as text, in which NaN equals NaN.
            measured = result.model_dump_json(include={"accuracy", "calibration", "sampled"})
            key = json.dumps(run, sort_keys=True)
            first, before, _ = found.setdefault(key, (source, measured, result))
            if before != measured:
                raise ResultError(
                    f"{first} and {source} are results of the same run and differ: "
                    f"{result.strategy} with seed {result.seed} in recipe {result.recipe!r}; "
                    "name only one of them"
                )
    if not found:
        raise ResultError(f"there is no finished run in {', '.join(map(str, paths))}")
    return sorted((result for *_, result in found.values()), key=lambda r: (r.recipe, r.seed))


def left_out(paths: Sequence[Path]) -> str:
    """A sentence on the runs in folders that :func:`read_results` leaves out, if there are any."""
    folders = [path for path in paths if path.is_dir()]
    files = [file for path in folders for name in _FILES for file in find_files(path, name)]
    runs = [StoredRun(path) for path in sorted({file.parent.resolve() for file in files})]
    states = Counter((run.path.parent.name, run.state()[0]) for run in runs)
    missing = {key: number for key, number in states.items() if key[1] != "finished"}
    which = ", ".join(f"{name} ({number} {state})" for (name, state), number in missing.items())
    number = f"{sum(missing.values())} of {len(runs)} runs"
    return f"{number} have no result and are left out: {printable(which)}." * bool(missing)


def _read(path: Path) -> Iterator[tuple[str, Result]]:
    """The results in a path, each with a description of its source."""
    if path.is_dir():
        files = find_files(path, "result.json")
        finished = {file.parent for file in files}
        begun = {file.parent for file in find_files(path, "run.json")}
        if unfinished := sorted(begun - finished):
            numbers = f"{len(unfinished)} of {len(begun | finished)} runs, such as {unfinished[0]}"
            _log.warning("left out as unfinished: %s; see `covon status %s`", numbers, path)
        for file in files:
            try:
                yield str(file), Result.load(file)
            except ResultError as error:
                _log.warning("%s; it is left out", error)
    elif path.suffix != ".jsonl":
        yield str(path), Result.load(path)
    else:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ResultError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            source = f"{path}, line {number}"
            if line.strip():
                yield source, Result.parse(line, source)
