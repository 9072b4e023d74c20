"""``covon recipes`` and ``covon show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covon_avalanche.cli.options import fail
from covon_avalanche.experiment.recipe import load_recipe, recipe_file, shipped_recipes
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import StoredRun


def recipes() -> None:
    """List the recipes that come with the package."""
    for name in shipped_recipes():
        typer.echo(f"{name}: {load_recipe(name).title}")


def show(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe, a .toml file, or a folder of runs.")
    ],
) -> None:
    """Print a recipe, or the state of all runs in a folder.

    Comments at the top list the classes that a run of the recipe would import.

    To start your own recipe: covon show NAME > mine.toml
    """
    if Path(recipe).is_dir():
        _show_runs(Path(recipe))
        return
    classes = [getattr(s, "implementation", "") for s in load_recipe(recipe).strategies.values()]
    for name in sorted({*classes} - {""}):
        typer.echo(f"# A run imports {name}: that executes its module.")
    typer.echo(recipe_file(recipe).read_text(encoding="utf-8"), nl=False)


def _show_runs(folder: Path) -> None:
    found = sorted(file.parent for file in folder.rglob("run.json"))
    if not found:
        fail(f"there are no runs in {folder}")
    table = Table("strategy", "run", "state", "")
    for path in found:
        table.add_row(*map(escape, (path.parent.name, path.name, *_state(StoredRun(path)))))
    Console().print(table)


def _state(run: StoredRun) -> tuple[str, str]:
    if run.result_file.exists():
        try:
            return "finished", f"A_T {100 * Result.load(run.result_file).average_accuracy:.2f} %"
        except ResultError as error:
            return "damaged", str(error)
    status = run.status()
    if status is not None and status.error is not None:
        return "failed", status.error
    return "running" if run.is_running() else "interrupted", str(status or "")
