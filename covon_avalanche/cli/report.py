"""``covon report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covon_avalanche.cli.errors import fail
from covon_avalanche.experiment.result import ResultError


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, result.json or .jsonl files.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the page, the tables and figures.")
    ] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
) -> None:
    """Make one HTML page of results, with tables as Markdown, LaTeX and CSV and all figures."""
    from covon_avalanche.report import load_results, write_report

    try:
        results = load_results(*runs)
        page = write_report(results, out, title=title)
    except ResultError as error:
        fail(str(error))
    except OSError as error:
        fail(f"the report cannot be written to {out}: {error.strerror}")
    typer.echo(f"{page}: {len(results)} runs; tables and figures beside it")
