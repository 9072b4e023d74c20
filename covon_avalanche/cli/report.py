"""``covon report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, result.json or .jsonl files.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the page, the tables and figures.")
    ] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Generate an HTML report with tables (Markdown, LaTeX, CSV) and figures."""
    from covon_avalanche.report import load_results, write_report

    results = load_results(*runs)
    page = write_report(results, out, title=title)
    typer.echo(f"{page}: {len(results)} runs; tables and figures beside it")
