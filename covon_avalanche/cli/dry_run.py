"""``covon run --dry-run``: find what would stop the runs, and estimate how long they take."""

from __future__ import annotations

import heapq
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING

import typer

from covon_avalanche.cli.options import counted, fail, missing_sentence
from covon_avalanche.experiment.data_settings import Backbone, missing_mnist
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_errors import error_sentence
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.worker_pool import import_avalanche

if TYPE_CHECKING:
    from avalanche.benchmarks import CLScenario


def check_and_estimate(
    new: Sequence[RunFolder], stored: Sequence[Result], processes: int, *, here: bool
) -> None:
    """Print what the runs need and their training times, from stored results or, without any, from
    a few batches; exit with status 2 at the first thing that would stop them before they train.

    :param new: the runs to start, of one recipe.
    :param processes: number of parallel runs.
    :param here: whether this machine runs them; a cluster's nodes may have other data and devices.
    """
    from covon_avalanche.experiment.machine import check_device

    recipe, root = new[0].recipe, new[0].dataset_root
    strategies = [folder.strategy for folder in new]
    lacking = missing_sentence(recipe, root)
    try:
        check_device(recipe.device)
    except ValueError as error:
        lacking = lacking or str(error)
    if lacking is not None:
        fail(lacking) if here else typer.echo(f"No estimates: {lacking}")
        return
    mnist, lines = missing_mnist(recipe.stream, root), []
    found = [f"MNIST will be downloaded to {mnist}."]
    if mnist is None:
        start = time.perf_counter()
        import_avalanche()
        from covon_avalanche.experiment.estimate import estimated_seconds, evaluation_seconds
        from covon_avalanche.experiment.run import checked_benchmark

        imported = time.perf_counter()
        with _problems():
            benchmark = checked_benchmark(recipe, recipe.seeds[0], root)
        reading = time.perf_counter() - imported  # by every run, and imports by every process
        found = _found(recipe, benchmark)
        ends = [imported - start] * processes
        runs: dict[str, float] = {}
        if {*strategies} - {run.strategy for run in stored}:
            typer.echo("Timing batches of strategies without stored results ...")
        for name in dict.fromkeys(strategies):
            number, source = strategies.count(name), "stored results"
            times = [(sum(r.train_seconds), 0.0) for r in stored if r.strategy == name]
            if not times:
                source = "timed batches of one process"
                with _problems(f"{name}: "), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about a training of few batches
                    estimate = estimated_seconds(recipe, name, benchmark, root)
                times = [] if estimate is None else [estimate]
            steps, after = (fmean(parts) for parts in zip(*(times or [(0.0, 0.0)]), strict=True))
            mean = steps + after
            evaluations = evaluation_seconds(recipe, name, benchmark, steps)
            runs[name] = reading + mean + evaluations
            needs = f"{_time(mean)} of training, from {source}" if times else "unknown time"
            lines.append(f"{name}: {number} x {needs}")
        for name in strategies:  # each run goes to the process that is free first
            heapq.heapreplace(ends, ends[0] + runs[name])
        lines.append(f"In total about {_time(max(ends))}, with start-up and evaluations")
    for line in found:
        typer.echo(line)
    if isinstance(recipe.model, Backbone) and recipe.model.weights == "default":
        name = recipe.model.backbone
        typer.echo(f"The weights of {name} will be downloaded, unless they are cached.")
    for line in lines:
        typer.echo(line)


def _found(recipe: Recipe, benchmark: CLScenario) -> list[str]:
    """Sentences with the numbers of images and, for folders of one's own, missing classes."""
    if not (images := getattr(benchmark, "images", {})):  # permuted pixels
        return ["The data are there."]
    counts = ", ".join(f"{sum(map(len, own.values()))} {part}" for part, own in images.items())
    domains = counted(len(images["train"]), "domain")
    found = f"{domains}, {benchmark.n_classes} classes, images: {counts}"
    lines = [f"The data are there: {found}."]
    for part, own in images.items() if recipe.stream.name == "DomainFolders" else ():
        for domain, some in own.items():
            there = {*some.labels}
            if absent := [c for i, c in enumerate(benchmark.classes) if i not in there]:
                names = ", ".join(absent[:5]) + f" and {len(absent) - 5} others" * (len(absent) > 5)
                lines.append(f"{domain} has no images of {names} ({part}).")
    return lines


@contextmanager
def _problems(prefix: str = "") -> Iterator[None]:
    """Exit with what is wrong with data or settings."""
    try:
        yield
    except Exception as error:  # a class of the user's own may raise any
        fail(prefix + error_sentence(error))


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
