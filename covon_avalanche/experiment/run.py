"""One run: a strategy of a recipe, with a seed, from data to result."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from avalanche.training.templates import SupervisedTemplate

from covon_avalanche.evaluation.calibration import Calibration
from covon_avalanche.evaluation.domain_metrics import DomainMetrics
from covon_avalanche.evaluation.memory import KeptTensors
from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.recipe import CORe50Stream, Joint, Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.plugins import CoVONPlugin

_PACKAGES = ("covon_avalanche", "torch", "avalanche-lib", "scikit-learn", "numpy")


def run_strategy(
    recipe: Recipe,
    strategy_name: str,
    seed: int,
    *,
    stream: Literal["test", "valid"] = "test",
    validation_size: float | None = None,
    dataset_root: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] = lambda experience, accuracy: None,
) -> Result:
    """Train through the stream, evaluating on all domains after each.

    :param seed: of permutations, initial weights, data order and noise. The same seed gives
        the same result on the same machine with the same number of threads.
    :param stream: what to evaluate on.
    :param validation_size: images to keep away from training for the ``valid`` stream, instead
        of the recipe's.
    :param dataset_root: where image data lies; see the streams.
    :param progress: called with the number of domains learned and the mean accuracy on them.
    """
    settings = recipe.strategies[strategy_name]
    benchmark = build_benchmark(
        recipe.stream, seed=seed, validation_size=validation_size, dataset_root=dataset_root
    )
    torch.manual_seed(seed)
    model = build_model(recipe.model, benchmark, dataset_root)
    official = isinstance(recipe.stream, CORe50Stream) and recipe.stream.split == "official"
    held_out = official and stream == "test"
    metrics = DomainMetrics(stream, held_out=held_out)
    strategy = build_strategy(settings, recipe, model, metrics)
    matrix = metrics.matrix
    joint = isinstance(settings, Joint)
    if joint:
        matrix.rows += [None] * (recipe.stream.n_experiences - 1)
    seconds = []
    diagnostics = []
    for experience in [benchmark.train_stream] if joint else benchmark.train_stream:
        start = time.perf_counter()
        strategy.train(experience)
        seconds.append(time.perf_counter() - start)
        diagnostics += _diagnostics(strategy)
        strategy.eval(benchmark.streams[stream])
        progress(len(matrix.rows), matrix.curve()[-1] or 0.0)
    return Result(
        recipe=recipe.name,
        strategy=strategy_name,
        seed=seed,
        stream=stream,
        settings={
            **recipe.model_dump(exclude={"strategies", "seeds"}),
            "strategy": settings.model_dump(),
        },
        accuracy=matrix.rows,
        counts=matrix.counts,
        average_accuracy=matrix.average_accuracy(),
        weighted_accuracy=matrix.weighted_accuracy(),
        bwt=matrix.bwt(),
        calibration=_mean(metrics.calibration[-1]),
        train_seconds=seconds,
        parameters=sum(p.numel() for p in model.parameters()),
        parameters_worth=next(
            p.parameters_worth for p in strategy.plugins if isinstance(p, KeptTensors)
        ),
        diagnostics=diagnostics,
        versions={"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}},
        machine={
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    )


def _mean(row: list[Calibration]) -> dict[str, float]:
    """Over the domains."""
    return {k: sum(getattr(c, k) for c in row) / len(row) for k in ("nll", "brier", "ece")}


def _diagnostics(strategy: SupervisedTemplate) -> list[dict[str, float]]:
    """Those of the experience just trained, where there are any."""
    found = [p.diagnostics for p in strategy.plugins if isinstance(p, CoVONPlugin)]
    return [d["all"]._asdict() for d in found if d]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
