"""``covon recipes``, ``covon strategies``, ``covon show`` and ``covon status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from covon_avalanche.cli.options import RecipeName, fail
from covon_avalanche.experiment.recipe import load_recipe, read_recipe, recipe_file, shipped_recipes
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.run_folder import StoredRun, distinct_settings, find_files
from covon_avalanche.experiment.search import is_search, searches_in


def recipes() -> None:
    """List the recipes that come with the package."""
    for name in shipped_recipes():
        typer.echo(f"{name}: {load_recipe(name).title}")


def strategies() -> None:
    """List the kinds of strategies that recipes can name, with the keys that they need."""
    for kind, cls in KINDS.items():
        needed = [name for name, field in cls.model_fields.items() if field.is_required()]
        summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].replace("`", "").split())
        stores = cls.model_construct(kind=kind, n_steps=2).stores_examples
        mark = " Stores examples." if stores else ""
        others = "; other keys are its arguments" if cls.model_config["extra"] == "allow" else ""
        keys = ", ".join(needed[1:]) or "no keys"
        if "preset" in cls.model_fields:
            keys = f"lr, and preset or {', '.join(key for key in needed[1:] if key != 'lr')}"
        typer.echo(f"{kind}: {summary}{mark} Needs {keys}{others}.")


def show(recipe: RecipeName) -> None:
    """Print a recipe, or the state of all runs in a folder, as `covon status` does.

    A recipe that extends another one is printed with all of its keys.

    Comments at the top list the classes that a run of the recipe would import.

    To start your own recipe: covon show NAME > mine.toml
    """
    if recipe not in shipped_recipes() and Path(recipe).is_dir():
        status(Path(recipe))
        return
    classes = [getattr(s, "implementation", "") for s in load_recipe(recipe).strategies.values()]
    for name in sorted({*classes} - {""}):
        typer.echo(f"# A run imports {name}: that executes its module.")
    typer.echo(read_recipe(recipe_file(recipe))[0], nl=False)


def status(folder: Annotated[Path, typer.Argument(help="Of runs or a search.")]) -> None:
    """Print the state of all runs, or of all trials of a search, in a folder."""
    if is_search(folder):
        print_searches(folder)
        return
    if not folder.is_dir():
        fail(f"there is no folder {folder}")
    files = (file for name in ("run.json", "result.json") for file in find_files(folder, name))
    found = sorted({file.parent for file in files})
    if not found:
        fail(f"no run has been started in {folder}")
    runs = [StoredRun(path) for path in found]  # sorted, so that those of a strategy follow
    states = [run.state() for run in runs]
    groups = groupby(runs, lambda run: run.path.parent)
    stored = ([run.own_settings() or {} for run in own] for _, own in groups)
    settings = [text for own in stored for text in distinct_settings(own)]
    table = {
        "recipe": [path.parents[1].name for path in found],
        "strategy": [path.parent.name for path in found],
        "run": [path.name for path in found],
        "state": [state for state, _ in states],
        "": [about for _, about in states],
        "settings": settings,
    }
    if len({*table["recipe"]}) == 1:
        del table["recipe"]
    if not any(settings):
        del table["settings"]
    _print_table(table)
    counts = Counter(state for state, _ in states)
    typer.echo(", ".join(f"{number} {state}" for state, number in counts.items()))


def print_searches(folder: Path) -> None:
    """Print trials, best A_T and its settings of each strategy, and the time that is left."""
    found = [search.summary() for search in searches_in(folder)]
    seconds = sum(row.pop("seconds") for row in found)
    _print_table(found)
    running = sum(int(row["running"]) for row in found)
    if running and seconds:
        typer.echo(f"about {seconds / running / 60:.0f} min left")


def _print_table(columns: Mapping[str, Sequence[str]] | Sequence[Mapping[str, str]]) -> None:
    import pandas as pd

    from covon_avalanche.report.tables import aligned

    table = pd.DataFrame(columns)
    typer.echo(aligned(table, left=len(table.columns), form="simple"))
