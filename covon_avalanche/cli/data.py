"""The ``covon data`` commands."""

from __future__ import annotations

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
    ProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from covon_avalanche.cli.options import fail
from covon_avalanche.datasets.catalogue import CATALOGUE, DataSet, RemoteFile
from covon_avalanche.datasets.download import download, unpack
from covon_avalanche.did_you_mean import did_you_mean

app = typer.Typer(help="List, download and verify image data sets.")

Name = Annotated[str, typer.Argument(help="A data set, see `covon data list`.")]
Root = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of all data sets.")]


@app.command("list")
def list_data() -> None:
    """List the available data sets and how to get them."""
    for dataset in CATALOGUE.values():
        typer.echo(f"{dataset.name}: {dataset.note}")


@app.command("download")
def download_data(name: Name, root: Root) -> None:
    """Download a data set; the same command resumes after an interruption.

    Archives are unpacked once; a file .NAME.unpacked marks them. One process at a time writes to
    the folder; the others wait.
    """
    dataset = _dataset(name)
    if not dataset.files:
        fail(f"{name} cannot be downloaded from here: {dataset.note}")
    folder = root / dataset.folder
    folder.mkdir(parents=True, exist_ok=True)
    bars = _bars(DownloadColumn(), TransferSpeedColumn())
    try:
        with FileLock(folder / ".download.lock"), bars:
            for file in dataset.files:
                _fetch(file, folder, bars)
    except ValueError as error:
        fail(str(error))


def _fetch(file: RemoteFile, folder: Path, bars: Progress) -> None:
    """Download and unpack a file, unless that is done."""
    done = folder / f".{file.name}.unpacked"
    if done.is_file():
        (folder / file.name).unlink(missing_ok=True)  # a kill may have left it
        return
    task = bars.add_task(file.name, total=file.size)
    path = download(file, folder, progress=lambda size: bars.update(task, completed=size))
    if path.suffix == ".zip":
        unpack(path, folder)
        done.touch()
        path.unlink()
    typer.echo(f"{file.name}: done")


@app.command("verify")
def verify_data(
    name: Name,
    root: Root,
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a CSV table of the good images.")
    ] = None,
    track: Annotated[
        str | None, typer.Option(metavar="NAME", help="Track of CDDB. \\[default: hard]")
    ] = None,
) -> None:
    """Read every image; exit status 1 if one is missing, empty, damaged or extra."""
    dataset = _dataset(name)
    if track is not None and dataset.name != "CDDB":
        fail(f"--track is for CDDB alone, got {track} for {name}")
    options: dict[str, Any] = {} if track is None else {"track": track}
    from covon_avalanche import streams
    from covon_avalanche.datasets.verify import verify, write_manifest

    try:
        with _bars(MofNCompleteColumn(), TimeRemainingColumn()) as bars:
            task = bars.add_task(name, total=None)
            report = verify(
                getattr(streams, name),
                root / dataset.folder,
                progress=lambda done, total: bars.update(task, completed=done, total=total),
                **options,
            )
        if manifest is not None:
            write_manifest(report, manifest)
    except ValueError as error:
        fail(str(error))
    problems = report.problems
    for problem in problems:
        typer.echo(problem)
    good = (report.images["problem"] == "").sum()
    typer.echo(f"{dataset.name}: {good} good images, {len(problems)} problems")
    raise typer.Exit(1 if problems else 0)


def _bars(*columns: ProgressColumn) -> Progress:
    """Progress bars, which are shown in a terminal only."""
    console = Console(stderr=True)
    disable = not console.is_terminal
    return Progress("{task.description}", BarColumn(), *columns, console=console, disable=disable)


def _dataset(name: str) -> DataSet:
    if name not in CATALOGUE:
        similar = did_you_mean(name, CATALOGUE)
        fail(f"there is no data set {name!r}; known are {', '.join(CATALOGUE)}{similar}")
    return CATALOGUE[name]
