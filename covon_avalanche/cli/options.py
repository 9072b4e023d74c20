"""Shared options, and how commands report errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

BAD_INPUT = 2
INTERRUPTED = 130

RecipeName = Annotated[
    str, typer.Argument(help="A shipped recipe (see `covon recipes`) or a .toml file.")
]
Strategies = Annotated[
    str | None, typer.Option(help="Some of the recipe's strategies, e.g. covon,ewc-star.")
]
Epochs = Annotated[
    int | None, typer.Option(min=1, max=10**6, help="Epochs per domain instead of the recipe's.")
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Parallel runs. \\[default: one per core, one on a GPU]"),
]
DatasetRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="E.g. strategies.covon.lr=0.02; repeatable."),
]


def fail(sentence: str, status: int = BAD_INPUT) -> NoReturn:
    """Print one sentence and exit."""
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(status)
