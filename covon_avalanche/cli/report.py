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
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write the report.")
    ] = Path("report"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
    archive: Annotated[
        bool, typer.Option("--zip", metavar="", help="Also write FOLDER.zip with all results.")
    ] = False,
) -> None:
    """Generate an HTML report with tables (Markdown, LaTeX, CSV) and figures."""
    from covon_avalanche.report import results_frame, write_archive, write_report
    from covon_avalanche.report.results import read_results

    found = read_results(runs)
    if archive:
        file = write_archive(found, out, title=title)
        typer.echo(f"{file}: the report, its recipes, and results.jsonl")
    else:
        write_report(results_frame(found), out, title=title)
    typer.echo(f"{out / 'index.html'}: {len(found)} runs; tables and figures beside it")
