"""How the command line refuses bad input."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(sentence: str) -> NoReturn:
    """Print one sentence and leave with status 2."""
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(2)
