"""``covon run --dry-run``: find what would stop the runs, and estimate how long they take."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean

import typer

from covon_avalanche.cli.options import fail, missing_sentence
from covon_avalanche.experiment.data_settings import Backbone, missing_mnist
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.registry.closed_form import ClosedForm
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import RunFolder, error_sentence
from covon_avalanche.experiment.run_options import RunOptions


def check_and_estimate(
    new: Sequence[RunFolder],
    stored: Sequence[Result],
    options: RunOptions,
    processes: int,
    *,
    here: bool,
) -> None:
    """Print what the runs need and their training times, from stored results or, without any, from
    a few batches; exit with status 2 at the first thing that would stop them before they train.

    :param new: the runs to start, of one recipe.
    :param processes: number of parallel runs.
    :param here: whether this machine runs them; a cluster's nodes may have other data and devices.
    """
    recipe = new[0].recipe
    missing = missing_sentence(recipe, options.dataset_root)
    if missing is not None and here:
        fail(missing)
    from covon_avalanche.experiment.machine import check_device

    try:
        check_device(recipe.device)
    except ValueError as error:
        if here:
            fail(str(error))
        missing = missing or f"no estimates: {error}"
    if missing is not None:
        typer.echo(missing)
        return
    mnist = missing_mnist(recipe.stream, options.dataset_root)
    seconds = {} if mnist is not None else _training_seconds(recipe, new, stored, options)
    typer.echo("The data are there." if mnist is None else f"MNIST will be downloaded to {mnist}.")
    if isinstance(recipe.model, Backbone) and recipe.model.weights == "default":
        name = recipe.model.backbone
        typer.echo(f"The weights of {name} will be downloaded, unless they are cached.")
    total = 0.0
    for strategy, (mean, source) in seconds.items():
        number = sum(folder.spec.strategy == strategy for folder in new)
        if mean is None:
            typer.echo(f"{strategy}: {number} runs, which train without batches: no estimate")
            continue
        closed = isinstance(recipe.strategies[strategy], ClosedForm) and source != _STORED
        what = "a pass over the images" if closed else "training"
        typer.echo(f"{strategy}: {number} x {_time(mean)} of {what}, from {source}")
        total += number * mean
    if seconds:
        typer.echo(f"In total about {_time(total / processes)} and evaluations")


_STORED = "stored results"


def _training_seconds(
    recipe: Recipe, new: Sequence[RunFolder], stored: Sequence[Result], options: RunOptions
) -> dict[str, tuple[float | None, str]]:
    """Seconds of a run of each strategy, and their source; all data and settings are checked."""
    from covon_avalanche.experiment.run import checked_benchmark, estimated_seconds

    found: dict[str, tuple[float | None, str]] = {}
    for strategy in dict.fromkeys(folder.spec.strategy for folder in new):
        times = [sum(run.train_seconds) for run in stored if run.strategy == strategy]
        found[strategy] = (fmean(times), _STORED) if times else (None, "timed batches")
    with _problems():
        benchmark = checked_benchmark(recipe, options)
    if any(source != _STORED for _, source in found.values()):
        typer.echo("Timing batches of strategies without stored results ...")
    for strategy, (_, source) in found.items():
        if source != _STORED:
            with _problems(f"{strategy}: "):
                mean = estimated_seconds(recipe, strategy, benchmark, options)
            found[strategy] = mean, f"{source} of one process"
    return found


@contextmanager
def _problems(prefix: str = "") -> Iterator[None]:
    """Exit with what is wrong with data or settings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        fail(prefix + error_sentence(error))


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
