"""From a recipe to a benchmark and a model."""

from __future__ import annotations

import os
from pathlib import Path

from avalanche.benchmarks import CLScenario
from avalanche.models import SimpleMLP
from torch import nn

from covon_avalanche import streams
from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment import data_settings

_FOLDERS = {"PACS": "PACS", "DomainNet": "domainnet", "CDDB": "CDDB", "CORe50": "core50"}


def build_benchmark(
    stream: data_settings.Stream,
    *,
    seed: int,
    validation_size: float | None = None,
    dataset_root: str | os.PathLike[str] | None = None,
) -> CLScenario:
    """The recipe's stream with the permutations of a seed.

    :param validation_size: instead of the recipe's.
    :param dataset_root: the folder with the data of all streams, each in its own below.
    """
    options = stream.model_dump(exclude={"name", "n_experiences", "image_size"})
    options["seed"] = seed
    if validation_size is not None:
        options["validation_size"] = validation_size
    build = getattr(streams, stream.name)
    if isinstance(stream, data_settings.PermutedStream):
        if stream.name == "PermutedMNIST":
            options["dataset_root"] = dataset_root
        return build(stream.n_experiences, **options)
    train, evaluation = streams.image_transforms(stream.image_size)
    root = None if dataset_root is None else Path(dataset_root) / _FOLDERS[stream.name]
    return build(dataset_root=root, train_transform=train, eval_transform=evaluation, **options)


def build_model(
    model: data_settings.Model,
    benchmark: CLScenario,
    dataset_root: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """The recipe's network, with inputs and outputs as the benchmark needs them."""
    if isinstance(model, data_settings.Perceptron):
        return SimpleMLP(
            num_classes=benchmark.n_classes,
            input_size=benchmark.train_stream[0].dataset[0][0].numel(),
            hidden_size=model.hidden_size,
            hidden_layers=model.hidden_layers,
            drop_rate=0,
        )
    weights: str | Path | None = model.weights
    if weights not in (None, "default"):
        weights = Path(dataset_root or ".") / str(weights)
    return create_backbone(model.backbone, benchmark.n_classes, weights=weights)
