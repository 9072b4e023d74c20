"""How commands end with an error."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer

BAD_INPUT = 2
INTERRUPTED = 130


def fail(sentence: str, status: int = BAD_INPUT) -> NoReturn:
    """Print one sentence and exit."""
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(status)


def make_folder(folder: Path) -> Path:
    """Create an output folder, or exit with a sentence that says why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"the folder {folder} cannot be made: {error.strerror}")
    return folder
