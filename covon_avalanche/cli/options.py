"""Shared options, and how commands report errors."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, NoReturn

import typer

from covon_avalanche.datasets.catalogue import CATALOGUE
from covon_avalanche.experiment.data_settings import data_folder, located
from covon_avalanche.experiment.recipe import Recipe

BAD_INPUT = 2
INTERRUPTED = 130


RecipeName = Annotated[
    str, typer.Argument(help="Name (see `covon recipes`) or .toml file; ./NAME is always a path.")
]
Strategies = Annotated[
    list[str] | None, typer.Option(metavar="NAMES", help="Subset, e.g. covon,ewc-star.")
]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Epochs per domain.")]
Jobs = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Parallel runs. \\[default: cores/GPUs]")
]


def expanded(path: Path | None) -> Path | None:
    """A path without ``~``, which shells leave as it is after ``--dataset-root=``."""
    return None if path is None else path.expanduser()


DatasetRoot = Annotated[
    Path | None, typer.Option(metavar="FOLDER", callback=expanded, help="Folder of the data sets.")
]


def joined(values: list[str] | None) -> str | None:
    """The values of an option that takes a list and may be repeated."""
    return ",".join(values) if values else None


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="E.g. strategies.covon.lr=0.02."),
]


def counted(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fail(sentence: str, status: int = BAD_INPUT) -> NoReturn:
    """Print one sentence and exit."""
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(status)


def missing_sentence(recipe: Recipe, dataset_root: Path | None) -> str | None:
    """What images or weights of a recipe are missing and how to get them, if any are."""
    names = {"data": data_folder(recipe.stream.model_dump())}
    names["weights"] = getattr(recipe.model, "weights", None)
    paths = {what: located(dataset_root, name) for what, name in names.items()}
    missing = [(what, path) for what, path in paths.items() if path and not path.exists()]
    if not missing:
        return None
    what, path = missing[0]
    dataset = CATALOGUE.get(recipe.stream.name)
    how = "give the folder of all data by --dataset-root"
    if what == "weights":
        how = "give their path in model.weights, or the folder below which it is by --dataset-root"
    elif dataset is not None and path.name == Path(dataset.folder).name:
        get = f"`covon data download {dataset.name} --root {quote(str(path.parent))}` fetches them"
        how += f"; {get if dataset.files else f'{dataset.name} is {dataset.note}'}"
    return f"the {what} are missing: there is no {path}; {how}"
