"""Stored results as a pandas DataFrame, one row per run. Nothing here imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.experiment.registry import stored_strategy
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import result_settings, upgrade_settings

_SAMPLED = ("sampled_average_accuracy", "sampled_nll", "sampled_brier", "sampled_ece")
MEASURES = (
    *("average_accuracy", "weighted_accuracy", "bwt", "forgetting", "max_forgetting"),
    *("nll", "brier", "ece", *_SAMPLED, "train_seconds"),
)
"""Columns of measured numbers."""


def load_results(*paths: str | Path) -> pd.DataFrame:
    """Load finished runs into a DataFrame with one row per run.

    Accuracies are fractions in [0, 1]; numbers that a run does not define are NaN.

    ======================= ==========================================================
    ``recipe``, ``title``   name and title of the recipe
    ``strategy``, ``kind``  name in the recipe and kind of strategy
    ``seed``
    ``stream``              name of the stream
    ``evaluated``           ``test`` or ``valid``
    ``ceiling``             trains on several domains at once; not a continual learner
    ``replay``              stores training examples of earlier domains
    ``average_accuracy``    A_T, mean over domains after the last one
    ``weighted_accuracy``   A_T pooled over the images of all domains
    ``bwt``, ``forgetting`` backward transfer, and its negative
    ``max_forgetting``      best earlier accuracy minus the last, mean over past domains
    ``nll``                 negative log-likelihood after the last domain, nats
    ``brier``, ``ece``      Brier score in [0, 2]; expected calibration error in [0, 1]
    ``sampled_*``           average_accuracy, nll, brier and ece with posterior samples
    ``train_seconds``       wall-clock training time of all domains, seconds
    ``parameters``          number of weights
    ``memory_ratio``        tensors kept between steps, in units of the weights
    ``peak_memory``         largest memory of the process or accelerator, bytes
    ``resumed``             how often the run was resumed
    ``run_hash``            hash of what decides the result
    ``accuracy``            ``accuracy[t][i]``, see :func:`accuracy_matrix`
    ``counts``              images per domain
    ``held_out``            whether the evaluated domains are never trained on
    ``reliability``         bins of (images, confidence, accuracy)
    ``epochs``              one dictionary per epoch: loss, accuracy, images, seconds
    ``diagnostics``         CoVON's posterior after each domain
    ``settings``            resolved settings of the run, a nested dictionary
    ``versions, machine``   dictionaries
    ``settings.*``          the settings by dotted name: ``settings.strategy.lr``
    ======================= ==========================================================

    :param paths: folders of runs, ``result.json`` files, or ``.jsonl`` files with one result per
        line. A run found twice is loaded once.
    :raises ResultError: naming a missing path, a damaged file or two results of the same run that
        differ, or if no finished run is found.
    """
    return results_frame(read_results(map(Path, paths)))


def accuracy_matrix(run: Mapping[str, Any] | pd.Series) -> AccuracyMatrix:
    """The accuracy matrix of a row of :func:`load_results`."""
    return AccuracyMatrix(run["counts"], run["accuracy"], run["held_out"])


def results_frame(results: Iterable[Result]) -> pd.DataFrame:
    """The DataFrame of :func:`load_results` from results in memory."""
    return pd.DataFrame([_row(result) for result in results])


def _row(result: Result) -> dict[str, Any]:
    settings = upgrade_settings(result.settings)
    strategy = stored_strategy(settings["strategy"])
    calibration = result.calibration if strategy.has_probabilities else {}
    return {
        "recipe": result.recipe,
        "title": str(settings.get("title", result.recipe)),
        "strategy": result.strategy,
        "kind": strategy.kind,
        "seed": result.seed,
        "stream": str(settings.get("stream", {}).get("name", "unknown stream")),
        "evaluated": result.stream,
        "ceiling": strategy.ceiling,
        "replay": strategy.stores_examples,
        "average_accuracy": result.average_accuracy,
        "weighted_accuracy": result.weighted_accuracy,
        "bwt": _or_nan(result.bwt),
        "forgetting": -_or_nan(result.bwt),
        "max_forgetting": _or_nan(result.matrix.max_forgetting()),
        **{name: calibration.get(name, math.nan) for name in ("nll", "brier", "ece")},
        **{n: result.sampled.get(n.removeprefix("sampled_"), math.nan) for n in _SAMPLED},
        "train_seconds": sum(result.train_seconds),
        "parameters": result.parameters,
        "memory_ratio": result.memory_ratio,
        "peak_memory": _or_nan(result.peak_memory),
        "resumed": result.resumed,
        "run_hash": result.run_hash,
        "accuracy": result.accuracy,
        "counts": result.counts,
        "held_out": result.held_out,
        "reliability": result.reliability if strategy.has_probabilities else [],
        "epochs": [epoch.model_dump() for epoch in result.epochs],
        "diagnostics": result.diagnostics,
        "settings": settings,
        "versions": result.versions,
        "machine": result.machine,
        **flatten(settings, "settings."),
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; lists stay whole and ``None`` is left out."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def read_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files and below folders, each run once; see :func:`load_results`."""
    paths = list(paths)
    found: dict[tuple[str, str, int, str, str], tuple[str, Result]] = {}
    for path in paths:
        for source, result in _read(path):
            name = (result.recipe, result.strategy, result.seed)
            settings = result.run_hash or json.dumps(
                result_settings(result.settings), sort_keys=True
            )
            first, known = found.setdefault((*name, settings, result.stream), (source, result))
            if _measured(known) != _measured(result):
                raise ResultError(
                    f"{first} and {source} are results of the same run and differ: "
                    f"{result.strategy} with seed {result.seed} in recipe {result.recipe!r}; "
                    "name only one of them"
                )
    if not found:
        raise ResultError(f"there is no finished run in {', '.join(map(str, paths))}")
    return sorted((result for _, result in found.values()), key=lambda r: (r.recipe, r.seed))


def _measured(result: Result) -> str:
    """What the run measured, as text, so that NaN equals NaN."""
    optional = {"epochs", "settings", "schema_version"}
    return json.dumps({k: v for k, v in result.outcome().items() if k not in optional})


def _read(path: Path) -> Iterator[tuple[str, Result]]:
    """The results in a path, each with a description of its source."""
    if path.is_dir():
        yield from ((str(file), Result.load(file)) for file in sorted(path.rglob("result.json")))
        return
    if path.suffix != ".jsonl":
        yield str(path), Result.load(path)
        return
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(file)  # str.splitlines would also split at other characters
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} has no results: it is not text") from error
    for number, line in enumerate(lines, 1):
        source = f"{path}, line {number}"
        yield source, Result.parse(line, source)
