"""The ``covon`` command."""

from __future__ import annotations

import time
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from covon_avalanche import __version__
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli_data import app as data
from covon_avalanche.cli_errors import fail
from covon_avalanche.cli_results import compare, report
from covon_avalanche.cli_search import search
from covon_avalanche.cores import runs_at_a_time
from covon_avalanche.display import Display
from covon_avalanche.experiment.grid import Event, jobs_of, run_grid
from covon_avalanche.experiment.recipe import (
    Recipe,
    RecipeError,
    choose,
    load_recipe,
    recipe_file,
    shipped_recipes,
)
from covon_avalanche.experiment.result import ResultError

app = typer.Typer(
    help="Bayesian, exemplar-free continual learning: fair comparisons on domain-incremental "
    "streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


_INTERRUPTED = 130  # the exit status after Ctrl-C


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


class Launcher(str, Enum):
    """Where runs go."""

    local = "local"
    slurm = "slurm"


Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="E.g. strategies.covon.lr=0.02; repeatable."),
]


@app.command()
def run(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            help="Shipped recipes (see `covon recipes`) or .toml files. "
            "\\[default: permuted-digits]"
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Some of the recipe's strategies only, e.g. covon,ewc-star."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds instead of the recipe's, e.g. 0-4 or 0,3,7.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs per domain instead of the recipe's.")
    ] = None,
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. \\[default: runs/RECIPE]")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time. \\[default: one per core, one on a GPU]"),
    ] = None,
    dataset_root: Annotated[
        Path | None, typer.Option(help="Where image data lies or is downloaded to.")
    ] = None,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(min=0, help="Store inside long epochs so often; ends of epochs are, too."),
    ] = 5.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard in the runs' folders.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(help="Log to this project of W&B.")] = None,
    launcher: Annotated[Launcher, typer.Option(help="Processes here, or jobs of a cluster.")] = (
        Launcher.local
    ),
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For the cluster, e.g. partition=gpu; repeatable."),
    ] = None,
) -> None:
    """Compare continual-learning strategies: train each with each seed, then a table and a plot.

    Every run has a folder FOLDER/STRATEGY/seed-SEED-HASH with its settings, log, checkpoints and
    result. The same command again skips what is finished and goes on where it was interrupted.
    The table goes to FOLDER/table.md and the plot to FOLDER/accuracy.png.
    """
    names = recipe or ["permuted-digits"]
    if out is not None and len(names) > 1:
        fail("--out is for one recipe; several go to runs/RECIPE each")
    if slurm and launcher is not Launcher.slurm:
        fail(f"--slurm {slurm[0]} is for --launcher slurm only")
    if jobs is not None and launcher is Launcher.slurm:
        fail(f"--jobs {jobs} is for runs on this machine, not for --launcher slurm")
    try:
        chosen = [
            choose(load_recipe(name, settings or ()), strategies, seeds, epochs) for name in names
        ]
    except RecipeError as error:
        fail(str(error))
    options: dict[str, object] = {"seconds": 60 * checkpoint_minutes}
    options |= {"tensorboard": tensorboard, "wandb": wandb}
    names = [one.name for one in chosen]
    if len(set(names)) < len(names):
        fail(f"recipes that are run together need different names, got {', '.join(names)}")
    statuses = []
    for one in chosen:
        folder = out or Path("runs") / one.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"the folder {folder} cannot be made: {error.strerror}")
        if launcher is Launcher.slurm:
            statuses.append(_submit(one, folder, dataset_root, options, slurm or []))
        else:
            statuses.append(_run_and_report(one, folder, jobs, dataset_root, options))
        if statuses[-1] == _INTERRUPTED:
            break
    raise typer.Exit(max(statuses))


def _run_and_report(
    recipe: Recipe,
    folder: Path,
    jobs: int | None,
    dataset_root: Path | None,
    options: dict[str, object],
) -> int:
    """Train, print and store; the exit status."""
    console = Console()
    start = time.perf_counter()
    grid = jobs_of(recipe)
    processes = min(jobs or runs_at_a_time(recipe.device), len(grid))
    runs = "run" if len(grid) == 1 else "runs"
    console.print(f"{recipe.title}: {len(grid)} {runs}, {processes} at a time", markup=False)
    display = Display(console, recipe, grid)
    interrupted = False
    try:
        with display:
            run_grid(
                recipe,
                grid,
                folder,
                processes=processes,
                dataset_root=None if dataset_root is None else str(dataset_root),
                notify=display.show,
                options=options,
            )
    except ResultError as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted = True
        console.print("Interrupted; the same command goes on from here.")
    _print_failures(display.failures)
    finished = sorted(display.finished, key=lambda r: list(recipe.strategies).index(r.strategy))
    if finished:
        from covon_avalanche.report import comparisons, figures, results_frame, tables

        (comparison,) = comparisons(results_frame(finished))
        console.print(tables.terminal_table(comparison))
        try:
            write_atomically(folder / "table.md", tables.markdown_table(comparison, tables.SHORT))
            figures.save_curves(comparison, folder / "accuracy.png")
        except OSError as error:
            fail(f"table.md and accuracy.png cannot be written to {folder}: {error.strerror}")
        console.print(
            "A_T: mean accuracy over all domains after the last. BWT: its change since\n"
            "each was learned. Seconds: training of one run. Memory: weights, optimizer\n"
            "state, anchors and stored examples, in units of the weights."
        )
        written = f"{folder}/accuracy.png, table.md and {len(finished)} result.json files"
        console.print(written, markup=False)
        console.print(f"`covon report {folder}` makes a page of them", soft_wrap=True, markup=False)
        console.print(f"{time.perf_counter() - start:.0f} seconds in all")
    if interrupted:
        return _INTERRUPTED
    return max((2 if event.bad_input else 1 for event in display.failures), default=0)


def _print_failures(failures: list[Event]) -> None:
    """One sentence for each error; the same one in many runs is told once."""
    by_error: dict[str, list[Event]] = defaultdict(list)
    for event in failures:
        by_error[str(event.error)].append(event)
    for error, (first, *others) in by_error.items():
        more = f" (and {len(others)} other runs)" if others else ""
        see = f"; see {first.log}" if first.log else ""
        job = first.job
        typer.echo(f"covon: {job.strategy}, seed {job.seed}{more}: {error}{see}", err=True)


def _submit(
    recipe: Recipe,
    folder: Path,
    dataset_root: Path | None,
    options: dict[str, object],
    parameters: list[str],
) -> int:
    """Send the runs to a cluster; the exit status."""
    from covon_avalanche.experiment.cluster import submit

    root = None if dataset_root is None else str(dataset_root)
    try:
        submitted = submit(
            recipe,
            jobs_of(recipe),
            folder,
            dataset_root=root,
            options=options,
            parameters=parameters,
        )
    except ValueError as error:
        fail(str(error))
    typer.echo(f"{len(submitted)} jobs of {recipe.title}: {submitted[0]} to {submitted[-1]}")
    typer.echo(f"when they are done: covon report {folder}")
    return 0


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    for name in shipped_recipes():
        typer.echo(f"{name}: {load_recipe(name).title}")


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a .toml file.")],
) -> None:
    """Print a recipe, to read it or to begin one of your own: covon show NAME > mine.toml"""
    try:
        file = recipe_file(recipe)
        load_recipe(recipe)
    except RecipeError as error:
        fail(str(error))
    text = file.read_text(encoding="utf-8")
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default"))
    else:
        typer.echo(text, nl=False)


app.command()(search)
app.command()(report)
app.command()(compare)
app.add_typer(data, name="data")
