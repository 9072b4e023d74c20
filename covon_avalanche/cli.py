"""The ``covon`` command."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from covon_avalanche import __version__
from covon_avalanche.cli_data import app as data
from covon_avalanche.experiment.grid import Event, Job, run_grid
from covon_avalanche.experiment.recipe import Recipe, RecipeError, load_recipe, shipped_recipes

app = typer.Typer(
    help="Bayesian, exemplar-free continual learning: fair comparisons on domain-incremental "
    "streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.add_typer(data, name="data")


def main() -> None:
    """Entry point of the console script."""
    app()


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(2)


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


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    for name in shipped_recipes():
        typer.echo(f"{name}: {load_recipe(name).title}")


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe (see `covon recipes`) or a .toml file.")
    ] = "permuted-digits",
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
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. [default: runs/RECIPE]")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. [default: one per core]")
    ] = None,
    dataset_root: Annotated[
        Path | None, typer.Option(help="Where image data lies or is downloaded to.")
    ] = None,
) -> None:
    """Compare continual-learning strategies: train each with each seed, then a table and a plot.

    Every run writes FOLDER/STRATEGY/seed-SEED/result.json as soon as it is done; the table
    goes to FOLDER/table.md and the plot to FOLDER/accuracy.png.
    """
    try:
        chosen = _choose(load_recipe(recipe), strategies, seeds, epochs)
    except RecipeError as error:
        _fail(str(error))
    folder = out or Path("runs") / chosen.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"the folder {folder} cannot be made: {error.strerror}")
    grid = [Job(strategy, seed) for seed in chosen.seeds for strategy in chosen.strategies]
    processes = min(jobs or os.cpu_count() or 1, len(grid))
    raise typer.Exit(_run_and_report(chosen, grid, folder, processes, dataset_root))


def _run_and_report(
    recipe: Recipe, grid: list[Job], folder: Path, processes: int, dataset_root: Path | None
) -> int:
    """Train, print and store; the exit status."""
    console = Console()
    start = time.perf_counter()
    console.print(
        f"{recipe.title}: {len(recipe.strategies)} strategies x {len(recipe.seeds)} seeds, "
        f"{processes} at a time"
    )
    display = _Display(console, recipe)
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
            )
    except KeyboardInterrupt:
        interrupted = True
        console.print("Interrupted; finished runs are on disk.")
    for error in display.errors:
        typer.echo(f"covon: {error}", err=True)
    finished = sorted(display.finished, key=lambda r: list(recipe.strategies).index(r.strategy))
    if finished:
        from covon_avalanche.experiment import report
        from covon_avalanche.experiment.result import write_atomically

        summaries = report.summarise(finished)
        console.print(report.rich_table(summaries, recipe.title))
        write_atomically(folder / "table.md", report.markdown_table(summaries))
        report.plot_curves(summaries, recipe.title, folder / "accuracy.png")
        console.print(
            "A_T: mean accuracy over all domains after the last. BWT: its change since\n"
            "each was learned. Seconds: training of one run. Memory: weights, optimizer\n"
            "state and anchors, in units of the weights."
        )
        console.print(f"{folder}/accuracy.png, table.md and {len(finished)} result.json files")
        console.print(f"{time.perf_counter() - start:.0f} seconds in all")
    return 130 if interrupted else 1 if display.errors else 0


def _choose(
    recipe: Recipe, strategies: str | None, seeds: str | None, epochs: int | None
) -> Recipe:
    """The recipe with what the command line overrides."""
    update: dict[str, object] = {}
    if strategies is not None:
        names = list(dict.fromkeys(name.strip() for name in strategies.split(",")))
        unknown = [name for name in names if name not in recipe.strategies]
        if unknown:
            raise RecipeError(
                f"recipe {recipe.name} has no strategy {', '.join(map(repr, unknown))}; known are "
                f"{', '.join(recipe.strategies)}"
            )
        update["strategies"] = {name: recipe.strategies[name] for name in names}
    if seeds is not None:
        update["seeds"] = _parse_seeds(seeds)
    if epochs is not None:
        update["epochs"] = epochs
    return recipe.model_copy(update=update)


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise RecipeError(f"seeds must look like 0-4 or 0,3,7, got {text!r}")
        found = list(range(int(first), int(last if dash else first) + 1))
        if not found:
            raise RecipeError(f"the range of seeds {part.strip()!r} is empty")
        seeds += found
    return list(dict.fromkeys(seeds))


class _Display:
    """One bar per strategy in a terminal, one line per finished run elsewhere."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self.finished: list = []
        self.errors: list[str] = []
        self._console = console
        self._domains: dict[Job, int] = {}
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("domains"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
            disable=not console.is_terminal,
        )
        total = len(recipe.seeds) * recipe.stream.n_experiences
        self._tasks = {
            name: self._progress.add_task(name, total=total, accuracy="", start=False)
            for name in recipe.strategies
        }

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Take in one event."""
        name, task = event.job.strategy, self._tasks[event.job.strategy]
        if event.error is not None:
            self.errors.append(f"{name}, seed {event.job.seed}: {event.error}")
            return
        self._domains[event.job] = max(event.domains, self._domains.get(event.job, 0))
        self._progress.start_task(task)
        done = sum(n for job, n in self._domains.items() if job.strategy == name)
        self._progress.update(task, completed=done)
        if event.result is None:
            return
        self.finished.append(event.result)
        runs = [r.average_accuracy for r in self.finished if r.strategy == name]
        accuracy = f"A_T {100 * sum(runs) / len(runs):.1f} %"
        self._progress.update(task, accuracy=accuracy)
        if not self._console.is_terminal:
            a, seconds = 100 * event.result.average_accuracy, sum(event.result.train_seconds)
            self._console.print(f"{name}, seed {event.job.seed}: A_T {a:.2f} %, {seconds:.1f} s")
