"""The ``covon data`` commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from covon_avalanche.cli.errors import fail
from covon_avalanche.datasets.catalogue import CATALOGUE, DataSet
from covon_avalanche.datasets.download import download, unpack

app = typer.Typer(help="List, download and verify image data sets.")

_IMAGES_A_LINE = 10_000

Name = Annotated[str, typer.Argument(help="One of those that `covon data list` names.")]
Root = Annotated[Path, typer.Option(help="The folder of all data; each set has its own below.")]


@app.command("list")
def list_data() -> None:
    """List the available data sets and how to get them."""
    for dataset in CATALOGUE.values():
        typer.echo(f"{dataset.name}: {dataset.note}")


@app.command("download")
def download_data(name: Name, root: Root) -> None:
    """Download a data set; the same command resumes after an interruption.

    Archives are unpacked once, next to a file .NAME.unpacked that says so. One process at a time
    writes to the folder; the others wait.
    """
    dataset = _dataset(name)
    if not dataset.files:
        fail(f"{name} cannot be downloaded from here: {dataset.note}")
    folder = root / dataset.folder
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".download.lock"):  # others wait, and find all of it there
                for file in dataset.files:
                    done = folder / f".{file.name}.unpacked"
                    if done.is_file():
                        continue
                    task = progress.add_task(file.name, total=file.size)
                    path = download(file, folder, progress=partial(_advance, progress, task))
                    if path.suffix == ".zip":
                        unpack(path, folder)
                        done.touch()
                        path.unlink()
                    typer.echo(f"{file.name}: done")
        except ValueError as error:
            fail(str(error))
        except OSError as error:
            fail(f"{folder} cannot be written: {error.strerror}")


def _advance(progress: Progress, task: TaskID, completed: int) -> None:
    progress.update(task, completed=completed)


@app.command("verify")
def verify_data(
    name: Name,
    root: Root,
    manifest: Annotated[
        Path | None, typer.Option(help="Write a table of the good images, for DomainFolders.")
    ] = None,
    track: Annotated[str | None, typer.Option(help="Of CDDB; by default hard.")] = None,
) -> None:
    """Read every image; exit status 1 if one is missing, empty, damaged or extra."""
    dataset = _dataset(name)
    if track is not None and dataset.name != "CDDB":
        fail(f"--track is for CDDB alone, got {track} for {name}")
    options: dict[str, Any] = {} if track is None else {"track": track}
    from covon_avalanche import streams
    from covon_avalanche.datasets.verify import verify, write_manifest

    try:
        with _reading(dataset.name) as progress:
            stream = getattr(streams, dataset.name)
            report = verify(stream, root / dataset.folder, progress=progress, **options)
        if manifest is not None:
            write_manifest(report, manifest)
    except ValueError as error:
        fail(str(error))
    problems = report.problems
    for problem in problems:
        typer.echo(problem)
    good = sum(not entry.problem for entry in report.entries)
    typer.echo(f"{dataset.name}: {good} good images, {len(problems)} problems")
    raise typer.Exit(1 if problems else 0)


@contextmanager
def _reading(name: str) -> Iterator[Callable[[int, int], None]]:
    """Images read of all, as a bar in a terminal, elsewhere as a line now and then."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and done % _IMAGES_A_LINE == 0:
                typer.echo(f"{name}: {done} of {total} images read", err=True)

        yield show


def _dataset(name: str) -> DataSet:
    if name not in CATALOGUE:
        fail(f"there is no data set {name!r}; known are {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
