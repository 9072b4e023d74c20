"""``covon run``."""

from __future__ import annotations

import time
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli.dry_run import check_and_estimate
from covon_avalanche.cli.options import (
    DatasetRoot,
    Epochs,
    Jobs,
    RecipeName,
    Settings,
    Strategies,
    counted,
    expanded,
    fail,
    joined,
    missing_sentence,
)
from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.experiment.grid import run_grid
from covon_avalanche.experiment.precision import SLOW, is_slow
from covon_avalanche.experiment.recipe import Recipe, choose, load_recipe
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import (
    RunFolder,
    finished_runs,
    other_data,
    other_settings,
    run_folders,
)
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.search import is_search
from covon_avalanche.experiment.worker_pool import default_processes


class Launcher(str, Enum):
    """Where runs are executed."""

    local = "local"
    slurm = "slurm"


def run(
    recipe: RecipeName = "permuted-digits",
    strategies: Strategies = None,
    seeds: Annotated[
        list[str] | None, typer.Option(metavar="LIST", help="Subset, e.g. 0-4 or 0,3,7.")
    ] = None,
    epochs: Epochs = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", callback=expanded, help="Results. \\[default: runs/RECIPE]"),
    ] = None,
    jobs: Jobs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Print what would run.")
    ] = False,
    dataset_root: DatasetRoot = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(metavar="N", min=0, help="Checkpoint interval.")
    ] = 5.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", metavar="", help="Write TensorBoard logs.")
    ] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", metavar="", help="Save models for `covon predict`.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="Log to W&B.")] = None,
    launcher: Annotated[Launcher, typer.Option(metavar="WHERE", help="local or slurm.")] = (
        Launcher.local
    ),
    slurm: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="E.g. slurm_partition=gpu.")
    ] = None,
) -> None:
    """Compare continual-learning strategies: train each with each seed, then print a table.

    Every run has a folder FOLDER/STRATEGY/seed-SEED-HASH with its settings, log, checkpoints and
    result. The same command again skips finished runs and resumes interrupted ones.
    The table goes to FOLDER/table.md and the plot to FOLDER/accuracy.png.
    """
    on_cluster = launcher is Launcher.slurm
    if slurm and not on_cluster:
        fail(f"--slurm {slurm[0]} is for --launcher slurm only")
    if jobs is not None and on_cluster:
        fail(f"--jobs {jobs} is for runs on this machine, not for --launcher slurm")
    if on_cluster and find_spec("submitit") is None:
        fail("--launcher slurm needs submitit: pip install 'covon_avalanche[cluster]'")
    whole = choose(load_recipe(recipe, settings or ()), epochs=epochs)
    chosen = choose(whole, joined(strategies), joined(seeds))
    if is_slow(chosen.precision, chosen.device) and not on_cluster:
        typer.echo(f"covon: {SLOW}", err=True)
    options = RunOptions(
        checkpoint_seconds=60 * checkpoint_minutes,
        tensorboard=tensorboard,
        bundle=bundle,
        wandb=wandb,
    )
    if bundle and (without := [k for k, s in chosen.strategies.items() if s.kind == "icarl"]):
        fail(f"--bundle cannot save {without[0]}: iCaRL predicts with its stored examples")
    runs = out or Path("runs") / chosen.name
    if is_search(runs):
        fail(f"{runs} has trials of `covon search`: choose another --out")
    if on_cluster:
        runs = runs.resolve()
    folders = run_folders(chosen, runs, dataset_root)
    missing = None if on_cluster else missing_sentence(chosen, dataset_root)
    if missing is None and (sentence := other_data(folders)) is not None:
        fail(sentence)
    new, damaged = [], []
    for folder in folders:
        try:
            if folder.result() is None:
                new.append(folder)
        except ResultError as error:
            damaged.append(error)
    if damaged and (dry_run or on_cluster):
        fail(str(damaged[0]))
    for sentence in other_settings(new):
        typer.echo(sentence)
    bare = [f for f in folders if f not in new and not (f.path / "bundle").exists()]
    if bundle and bare:
        typer.echo(
            f"{counted(len(bare), 'run')} finished without --bundle, so no model was saved: to "
            "train again, remove the folders or choose another --out"
        )
    parallel = min(jobs or default_processes(chosen.device), max(1, len(new)))
    finished = len(folders) - len(new) - len(damaged)
    done = f"{finished} finished, {len(new)} to run, {parallel} in parallel"
    header = f"{chosen.title}: {counted(len(folders), 'run')}, {done}"
    if dry_run:
        typer.echo(header)
        if new:
            stored = finished_runs(whole, runs, dataset_root)
            check_and_estimate(new, stored, parallel, here=not on_cluster)
        return
    if new and missing is not None:
        fail(missing)
    runs.mkdir(parents=True, exist_ok=True)
    if on_cluster:
        _submit(chosen, new, runs, options, slurm or [])
    else:
        typer.echo(header)
        raise typer.Exit(_run_and_summarise(folders, whole, runs, options, parallel))


def _run_and_summarise(
    folders: list[RunFolder], whole: Recipe, runs: Path, options: RunOptions, processes: int
) -> int:
    """Train, print and store the results; return the exit status.

    :param whole: the recipe with all of its strategies, which the table shows if they have run.
    """
    console = Console()
    start = time.perf_counter()
    progress = GridProgress(console, len(folders))
    status = progress.follow(partial(run_grid, folders, options, processes=processes))
    if any(outcome.result is not None for outcome in progress.outcomes):
        _summarise(finished_runs(whole, runs, folders[0].dataset_root, store=True), runs, console)
        console.print(f"Total time: {time.perf_counter() - start:.0f} s")
    return status


def _summarise(results: list[Result], folder: Path, console: Console) -> None:
    """Write the table and the plot to files, and print it."""
    from covon_avalanche.report import comparisons, figures, results_frame, tables

    found = comparisons(results_frame(results))  # several, if runs differ in precision = "auto"
    for comparison in found:  # printed first, for the disk may be full
        typer.echo(tables.aligned(tables.summary_table(comparison, tables.FULL), form="simple"))
        for remark in comparison.remarks:
            typer.echo(remark)
    write_atomically(folder / "table.md", tables.markdown(found, tables.FULL))
    figures.save(found[0], "curves", folder / "accuracy.png")
    shown = tables.metrics_of(found[0], tables.FULL)
    text = ". ".join(f"{metric.heading}: {metric.meaning}" for metric in shown)
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)
    typer.echo(
        f"{folder}/accuracy.png, table.md and {counted(len(results), 'result.json file')}\n"
        f"`covon report {quote(str(folder))}` generates an HTML report"
    )


def _submit(
    recipe: Recipe, new: list[RunFolder], runs: Path, options: RunOptions, parameters: list[str]
) -> None:
    """Submit runs to a cluster."""
    from covon_avalanche.experiment.cluster import submit

    if not new:
        typer.echo(f"{recipe.title}: all runs are finished")
        return
    try:
        jobs = submit(new, options, parameters=parameters)
    except ValueError as error:
        fail(str(error))
    numbers = jobs[0] if len(jobs) == 1 else f"{jobs[0]} to {jobs[-1]}"
    typer.echo(f"{counted(len(jobs), 'job')} of {recipe.title}: {numbers}")
    typer.echo(f"`covon status {quote(str(runs))}` prints their state")
