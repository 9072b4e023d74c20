"""The ``covon data`` commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    ProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from covon_avalanche.cli.options import (
    DatasetRoot,
    RecipeName,
    Settings,
    counted,
    expanded,
    fail,
    missing_sentence,
)
from covon_avalanche.datasets.catalogue import CATALOGUE, DataSet, RemoteFile
from covon_avalanche.datasets.download import download, unpack
from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.experiment.data_settings import PermutedStream, data_root
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.worker_pool import import_avalanche

app = typer.Typer(help="List, download and verify image data sets.")

Name = Annotated[str, typer.Argument(help="A data set, see `covon data list`.")]
Root = Annotated[
    Path,
    typer.Option(
        "--root", "--dataset-root", metavar="FOLDER", callback=expanded, help="Of all data sets."
    ),
]


@app.command("list")
def list_data(
    recipe: RecipeName = "",
    split: Annotated[str, typer.Option(metavar="NAME", help="train, valid or test.")] = "test",
    settings: Settings = None,
    dataset_root: DatasetRoot = None,
) -> None:
    """List the available data sets and how to get them, or the images of a recipe as CSV.

    These are the images of the recipe's first seed. The columns are domain, class, split and path,
    which is relative to the folder of the data sets.
    """
    if not recipe:
        for dataset in CATALOGUE.values():
            typer.echo(f"{dataset.name}: {dataset.note}")
        return
    benchmark_of = _stream_of(recipe, dataset_root, settings=settings or ())
    import pandas as pd

    from covon_avalanche.safe_text import csv_text, in_utf8

    try:
        benchmark = benchmark_of(dataset_root=dataset_root)
    except ValueError as error:
        fail(str(error))
    if split not in benchmark.streams:
        fail(f"--split must be one of {', '.join(benchmark.streams)}, got {split}")
    root = data_root(dataset_root)
    rows = [
        (domain, benchmark.classes[label], split, in_utf8(os.path.relpath(file, root)))
        for domain, images in benchmark.images[split].items()
        for file, label in zip(images.names, images.labels, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["domain", "class", "split", "path"])
    typer.echo(csv_text(table).encode(), nl=False)


def _stream_of(
    recipe: str, dataset_root: Path | None, settings: Sequence[str] = (), **stream: object
) -> Callable[..., Any]:
    """A function of ``dataset_root`` that makes a recipe's benchmark of image files, for the first
    seed and without a cache.

    :param stream: keys of the stream that replace the recipe's.
    """
    chosen = load_recipe(recipe, settings)
    own = chosen.stream
    if isinstance(own, PermutedStream):
        fail(f"{own.name} has no image files to list: each domain permutes the same pixels")
    if missing := missing_sentence(chosen, dataset_root):
        fail(missing)
    import_avalanche()
    from covon_avalanche.experiment.build import build_benchmark

    own = own.model_copy(update={"cache_size": None, **stream})
    chosen = chosen.model_copy(update={"stream": own})
    return partial(build_benchmark, chosen, seed=chosen.seeds[0])


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
    name: Annotated[str, typer.Argument(help="A data set, or the TOML file of a recipe.")],
    root: Root,
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV table of good images to write.")
    ] = None,
) -> None:
    """Read every image; exit status 1 if one is missing, empty or damaged."""
    from covon_avalanche import streams
    from covon_avalanche.datasets.verify import verify, write_manifest

    if name.endswith(".toml"):
        stream = _stream_of(name, root, limit=None, train_limit=None)
    else:
        stream = getattr(streams, _dataset(name).name)
        root = root / CATALOGUE[name].folder

    try:
        with _bars(MofNCompleteColumn(), TimeRemainingColumn()) as bars:
            task = bars.add_task(name, total=None)
            report = verify(
                stream,
                root,
                progress=lambda done, total: bars.update(task, completed=done, total=total),
            )
        if manifest is not None:
            write_manifest(report, manifest)
    except ValueError as error:
        fail(str(error))
    problems = report.problems
    for problem in problems:
        typer.echo(problem)
    good = (report.images["problem"] == "").sum()
    found = f"{counted(good, 'good image')}, {counted(len(problems), 'problem')}"
    typer.echo(f"{name}: {found}")
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
