"""The ``covon`` command: one module a command. Starting it does not import torch."""

from __future__ import annotations

from typing import Annotated

import typer

from covon_avalanche import __version__
from covon_avalanche.cli import compare, data, recipes, report, run, search, show

app = typer.Typer(
    help="Bayesian, exemplar-free continual learning: fair comparisons on domain-incremental "
    "streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (run.run, search.search, report.report, compare.compare, recipes.recipes, show.show):
    app.command()(command)
app.add_typer(data.app, name="data")


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
