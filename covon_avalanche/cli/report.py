"""``covon report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covon_avalanche.cli.options import counted, expanded, fail


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs or a search, result.json or .jsonl files.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", callback=expanded, help="Where to write the report."
        ),
    ] = Path("report"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
    columns: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Of table.md and table.tex, e.g. A_T,BWT,seeds."),
    ] = "",
    archive: Annotated[
        bool, typer.Option("--zip", metavar="", help="Also write FOLDER.zip with all results.")
    ] = False,
) -> None:
    """Generate an HTML report with tables (Markdown, LaTeX, CSV) and figures."""
    from covon_avalanche.experiment.search import is_search
    from covon_avalanche.report.page import write_archive, write_report
    from covon_avalanche.report.results import left_out, read_results, results_frame
    from covon_avalanche.report.tables import check_headings

    names = [name.strip() for name in columns.split(",") if name.strip()]
    try:
        check_headings(names)
    except ValueError as error:
        fail(str(error))
    searches = [path for path in runs if is_search(path)]
    others = [path for path in runs if path not in searches]
    found = read_results(others) if others else []
    options: dict[str, Any] = {"title": title, "searches": searches, "columns": names}
    options["missing"] = left_out(others)
    if archive:
        file = write_archive(found, out, **options)
        typer.echo(f"{file}: the report, its recipes, and results.jsonl")
    else:
        write_report(results_frame(found), out, **options)
    what = counted(len(found), "run") if others else "the trials of a search"
    typer.echo(f"{out / 'index.html'}: {what}; tables and figures beside it")
