"""From a recipe to a benchmark and a model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from avalanche.benchmarks import CLScenario
from avalanche.benchmarks.datasets import default_dataset_location
from avalanche.models import SimpleMLP
from torch import nn

from covon_avalanche import streams
from covon_avalanche.backbones import create_backbone, normalisation
from covon_avalanche.experiment.data_settings import (
    Backbone,
    FolderStream,
    Model,
    Perceptron,
    PermutedStream,
)
from covon_avalanche.experiment.recipe import Recipe

_FOLDERS = {"PACS": "PACS", "DomainNet": "domainnet", "CDDB": "CDDB", "CORe50": "core50"}


def build_benchmark(
    recipe: Recipe,
    *,
    seed: int,
    validation_size: float | None = None,
    dataset_root: str | os.PathLike[str] | None = None,
) -> CLScenario:
    """The recipe's stream with the permutations of a seed; images as its backbone expects them.

    :param validation_size: instead of the recipe's.
    :param dataset_root: the folder with the data of all streams, each in its own below; by
        default Avalanche's data folder.
    """
    stream, model = recipe.stream, recipe.model
    unlike = {"name", "folder", "n_experiences", "image_size", "cache_size"}
    options = stream.model_dump(exclude=unlike, exclude_none=True) | {"seed": seed}
    if validation_size is not None:
        options["validation_size"] = validation_size
    build = getattr(streams, stream.name)
    if isinstance(stream, PermutedStream):
        if stream.name == "PermutedMNIST":
            options["dataset_root"] = dataset_root
        return build(stream.n_experiences, **options)
    colours = normalisation(model.backbone) if isinstance(model, Backbone) else {}
    train, evaluation = streams.image_transforms(stream.image_size, **colours)
    if isinstance(stream, FolderStream):
        root: Path | None = _below(dataset_root, stream.folder)
    else:
        root = None if dataset_root is None else Path(dataset_root) / _FOLDERS[stream.name]
    if stream.cache_size is not None:
        options["cache"] = _below(dataset_root, "cache")
        options["cache_size"] = stream.cache_size
    return build(dataset_root=root, train_transform=train, eval_transform=evaluation, **options)


def build_model(
    model: Model,
    benchmark: CLScenario,
    dataset_root: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """The recipe's network, with inputs and outputs as the benchmark needs them.

    Backbones hold their weights with channels last, for which convolutions are faster.

    :param dataset_root: where relative paths of weights begin, as for ``build_benchmark``.
    """
    if isinstance(model, Perceptron):
        return SimpleMLP(
            num_classes=benchmark.n_classes,
            input_size=benchmark.train_stream[0].dataset[0][0].numel(),
            hidden_size=model.hidden_size,
            hidden_layers=model.hidden_layers,
            drop_rate=0,
        )
    weights = weights_file(model, dataset_root) or model.weights or None
    height = benchmark.test_stream[0].dataset.eval()[0][0].shape[-2]
    backbone = create_backbone(
        model.backbone, benchmark.n_classes, weights=weights, image_size=height
    )
    return backbone.to(memory_format=torch.channels_last)


def weights_file(model: Model, dataset_root: str | os.PathLike[str] | None = None) -> Path | None:
    """The file that a backbone's weights come from, if it is one of the user's."""
    if isinstance(model, Perceptron) or model.weights in ("", "default"):
        return None
    return _below(dataset_root, model.weights)


def _below(dataset_root: str | os.PathLike[str] | None, path: str) -> Path:
    """A path below the folder of the data; an absolute one as it is."""
    return Path(default_dataset_location("") if dataset_root is None else dataset_root) / path
