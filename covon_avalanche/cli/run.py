"""``covon run``."""

from __future__ import annotations

import time
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli.options import (
    BAD_INPUT,
    INTERRUPTED,
    DatasetRoot,
    Epochs,
    Jobs,
    RecipeName,
    Settings,
    Strategies,
    fail,
)
from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.experiment.grid import Outcome, run_grid, specs_of
from covon_avalanche.experiment.recipe import Recipe, choose, load_recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import default_processes


class Launcher(str, Enum):
    """Where runs are executed."""

    local = "local"
    slurm = "slurm"


def run(
    recipe: RecipeName = "permuted-digits",
    strategies: Strategies = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds instead of the recipe's, e.g. 0-4 or 0,3,7.")
    ] = None,
    epochs: Epochs = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. \\[default: runs/RECIPE]")
    ] = None,
    jobs: Jobs = None,
    dataset_root: DatasetRoot = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0, help="Interval of checkpoints inside epochs.")
    ] = 5.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard in the runs' folders.")
    ] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Save the models, for `covon predict`.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(help="Log to this project of W&B.")] = None,
    mlflow: Annotated[str | None, typer.Option(help="Log to this experiment of MLflow.")] = None,
    launcher: Annotated[Launcher, typer.Option(help="Processes here, or jobs of a cluster.")] = (
        Launcher.local
    ),
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Such as slurm_partition=gpu; repeatable."),
    ] = None,
) -> None:
    """Compare continual-learning strategies: train each with each seed, then print a table.

    Every run has a folder FOLDER/STRATEGY/seed-SEED-HASH with its settings, log, checkpoints and
    result. The same command again skips finished runs and resumes interrupted ones.
    The table goes to FOLDER/table.md and the plot to FOLDER/accuracy.png.
    """
    if slurm and launcher is not Launcher.slurm:
        fail(f"--slurm {slurm[0]} is for --launcher slurm only")
    if jobs is not None and launcher is Launcher.slurm:
        fail(f"--jobs {jobs} is for runs on this machine, not for --launcher slurm")
    chosen = choose(load_recipe(recipe, settings or ()), strategies, seeds, epochs)
    options = RunOptions(
        dataset_root=dataset_root,
        checkpoint_seconds=60 * checkpoint_minutes,
        tensorboard=tensorboard,
        bundle=bundle,
        wandb=wandb,
        mlflow=mlflow,
    )
    folder = out or Path("runs") / chosen.name
    folder.mkdir(parents=True, exist_ok=True)
    if launcher is Launcher.slurm:
        _submit(chosen, folder, options, slurm or [])
    else:
        raise typer.Exit(_run_and_summarise(chosen, folder, options, jobs))


def _run_and_summarise(recipe: Recipe, folder: Path, options: RunOptions, jobs: int | None) -> int:
    """Train, print and store the results; return the exit status."""
    console = Console()
    start = time.perf_counter()
    specs = specs_of(recipe)
    processes = min(jobs or default_processes(recipe.device), len(specs))
    runs = "run" if len(specs) == 1 else "runs"
    console.print(f"{recipe.title}: {len(specs)} {runs}, {processes} in parallel", markup=False)
    progress = GridProgress(console, recipe, specs, folder)
    interrupted = False
    try:
        with progress.bars:
            run_grid(
                recipe,
                specs,
                folder,
                options,
                processes=processes,
                on_end=progress.end,
                poll=progress.poll,
            )
    except KeyboardInterrupt:
        interrupted = True
        console.print("Interrupted; the same command resumes from here.")
    failures = [outcome for outcome in progress.outcomes if outcome.error is not None]
    _print_failures(failures)
    results = [outcome.result for outcome in progress.outcomes if outcome.result is not None]
    if results:
        _summarise(results, folder)
        console.print(f"Total time: {time.perf_counter() - start:.0f} s")
    if interrupted:
        return INTERRUPTED
    return max((BAD_INPUT if failure.bad_input else 1 for failure in failures), default=0)


def _summarise(results: list[Result], folder: Path) -> None:
    """Print the table, and write it and the plot to files."""
    from covon_avalanche.report import comparisons, figures, results_frame, tables

    (comparison,) = comparisons(results_frame(results))
    typer.echo(tables.aligned(tables.summary_table(comparison, tables.FULL), form="simple"))
    write_atomically(folder / "table.md", tables.markdown_table(comparison, tables.FULL))
    figures.save_curves(comparison, folder / "accuracy.png")
    typer.echo(
        "A_T: accuracy after the last domain, mean over all domains; pooled: over all\n"
        "images. Mean A_t: mean over time of the accuracy on the domains so far. BWT:\n"
        "change of a domain's accuracy since it was learned. Max forgetting: its best\n"
        "accuracy before the last domain minus the final one. Seconds: training of one\n"
        "run. Memory: weights, optimizer state, anchors and stored examples, in units\n"
        "of the weights.\n"
        f"{folder}/accuracy.png, table.md and {len(results)} result.json files\n"
        f"`covon report {folder}` generates an HTML report"
    )


def _print_failures(failures: list[Outcome]) -> None:
    """One sentence per error, which several runs may share."""
    by_error: dict[str, list[Outcome]] = defaultdict(list)
    for failure in failures:
        by_error[str(failure.error)].append(failure)
    for error, (first, *others) in by_error.items():
        more = f" (and {len(others)} other runs)" if others else ""
        see = f"; see {first.log}" if first.log else ""
        spec = first.spec
        typer.echo(f"covon: {spec.strategy}, seed {spec.seed}{more}: {error}{see}", err=True)


def _submit(recipe: Recipe, folder: Path, options: RunOptions, parameters: list[str]) -> None:
    """Submit the runs to a cluster."""
    from covon_avalanche.experiment.cluster import submit

    try:
        jobs = submit(recipe, specs_of(recipe), folder, options, parameters=parameters)
    except ValueError as error:
        fail(str(error))
    typer.echo(f"{len(jobs)} jobs of {recipe.title}: {jobs[0]} to {jobs[-1]}")
    typer.echo(f"`covon show {folder}` prints their state")
