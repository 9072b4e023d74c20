"""``covon compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covon_avalanche.cli.errors import fail
from covon_avalanche.experiment.difference import (
    Difference,
    result_differences,
    settings_differences,
)
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.report.load_results import collect_results


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run, or its result.json.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Print what differs between two runs, in settings and in results."""
    a, b = _one(first), _one(second)
    console = Console()
    settings = settings_differences(a, b)
    if settings:
        console.print(_table("Settings", settings, a, b))
    else:
        console.print("The settings are the same.")
    results = result_differences(a, b)
    if results:
        console.print(_table("Results", results, a, b, change=True))
    else:
        console.print("The results are the same.")


def _one(path: Path) -> Result:
    try:
        results = collect_results([path])
    except ResultError as error:
        fail(str(error))
    if len(results) > 1:
        fail(f"{path} has {len(results)} runs; name the folder of one")
    return results[0]


def _table(
    title: str, differences: list[Difference], a: Result, b: Result, change: bool = False
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in (a, b):
        table.add_column(escape(f"{result.strategy}, seed {result.seed}"), justify="right")
    if change:
        table.add_column("change", justify="right")
    for name, first, second in differences:
        cells = [name, _cell(first), _cell(second)]
        if change:
            both = isinstance(first, float | int) and isinstance(second, float | int)
            cells.append(f"{second - first:+.4g}" if both else "")
        table.add_row(*map(escape, cells))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
