"""``covon compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covon_avalanche.cli.errors import fail
from covon_avalanche.experiment.result import ResultError

if TYPE_CHECKING:
    import pandas as pd


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run, or its result.json.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Print what differs between two runs, in settings and in results."""
    from covon_avalanche.report.compare import result_differences, settings_differences

    a, b = _one_run(first), _one_run(second)
    console = Console()
    for title, differences in (
        ("Settings", settings_differences(a, b)),
        ("Results", result_differences(a, b)),
    ):
        if differences.empty:
            console.print(f"The {title.lower()} are the same.")
        else:
            console.print(_table(title, differences, a, b))


def _one_run(path: Path) -> pd.Series:
    from covon_avalanche.report import load_results

    try:
        runs = load_results(path)
    except ResultError as error:
        fail(str(error))
    if len(runs) > 1:
        fail(f"{path} has {len(runs)} runs; name the folder of one")
    return runs.iloc[0]


def _table(title: str, differences: pd.DataFrame, a: pd.Series, b: pd.Series) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in (a, b):
        table.add_column(escape(f"{run['strategy']}, seed {run['seed']}"), justify="right")
    if title == "Results":
        table.add_column("change", justify="right")
    for name, first, second in differences.itertuples():
        cells = [name, _cell(first), _cell(second)]
        if title == "Results":
            cells.append("" if None in (first, second) else f"{second - first:+.4g}")
        table.add_row(*map(escape, cells))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
