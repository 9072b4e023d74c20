"""Build a benchmark, a model and an Avalanche strategy from a recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from avalanche.benchmarks import CLScenario
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import nn

from covon_avalanche import streams
from covon_avalanche.backbones import normalisation
from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.experiment.data_settings import (
    Backbone,
    Model,
    PermutedStream,
    data_folder,
    data_root,
    located,
)
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.precision import used_precision
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.registry import StrategySettings
from covon_avalanche.experiment.resumable import Resumable
from covon_avalanche.experiment.run_errors import is_out_of_memory
from covon_avalanche.loops import Autocast


def build_benchmark(recipe: Recipe, *, seed: int, dataset_root: Path | None = None) -> CLScenario:
    """The recipe's stream with the permutations of a seed; images as its backbone expects them.

    :param dataset_root: the folder with the data of all streams, each in its own below; by
        default Avalanche's data folder.
    """
    stream, model = recipe.stream, recipe.model
    recipe_only = {"name", "folder", "n_experiences", "image_size", "cache_size"}
    options = stream.model_dump(exclude=recipe_only, exclude_none=True) | {"seed": seed}
    build = getattr(streams, stream.name)
    if isinstance(stream, PermutedStream):
        if stream.name == "PermutedMNIST":
            options["dataset_root"] = dataset_root
        return build(stream.n_experiences, **options)
    colours = normalisation(model.backbone) if isinstance(model, Backbone) else {}
    train, evaluation = streams.image_transforms(stream.image_size, **colours)
    root = located(dataset_root, data_folder(stream.model_dump()))
    if stream.cache_size is not None:
        options["cache"] = data_root(dataset_root) / "cache"
        options["cache_size"] = stream.cache_size
    return build(dataset_root=root, train_transform=train, eval_transform=evaluation, **options)


def build_model(
    model: Model,
    benchmark: CLScenario,
    dataset_root: Path | None = None,
    with_text: bool = False,
) -> nn.Module:
    """The recipe's network, with inputs and outputs as the benchmark needs them.

    :param dataset_root: where relative paths of weights begin, as for ``build_benchmark``.
    :param with_text: keep the text tower of a CLIP, for the benchmark's class names.
    :raises ValueError: if the network does not take images of the benchmark's size.
    """
    example = benchmark.test_stream[0].dataset.eval()[0][0]
    if not isinstance(model, Backbone):
        return model.build(benchmark.n_classes, example.shape)
    weights = located(dataset_root, model.weights) or model.weights or None
    names = benchmark.classes if with_text else None
    try:
        network = model.build(
            benchmark.n_classes, example.shape, weights=weights, class_names=names
        )
        with torch.no_grad():
            network.eval()(example[None])
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        size = example.shape[-1]
        raise ValueError(f"image_size = {size} does not fit {model.backbone}: {error}") from error
    return network.train()


class CosinePlugin(SupervisedPlugin):
    """Lowers all learning rates along a cosine over the epochs of each domain.

    :param final: factor of the learning rates in the last epoch, relative to the first; 1 leaves
        them to others.
    :raises ValueError: if something else changes them during a domain, which would have no effect.
    """

    def __init__(self, final: float) -> None:
        super().__init__()
        self.final = final
        self._rates: list[float] = []

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self._rates = [group["lr"] for group in strategy.optimizer.param_groups]

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        epoch = strategy.clock.train_exp_epochs
        now = [group["lr"] for group in strategy.optimizer.param_groups]
        if self.final < 1 and epoch > 0 and now != self._rates_in(epoch - 1, strategy):
            raise ValueError(
                f"the learning rate was changed to {now[0]:g} during a domain, but the recipe's "
                "cosine schedule sets it in each epoch: set final_lr_factor = 1"
            )
        self._set(self._rates_in(epoch, strategy), strategy)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self._set(self._rates, strategy)

    def _rates_in(self, epoch: int, strategy: Any) -> list[float]:
        progress = min(epoch / max(1, strategy.train_epochs - 1), 1.0)
        factor = self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
        return [factor * rate for rate in self._rates]

    def _set(self, rates: list[float], strategy: Any) -> None:
        if self.final < 1:
            for group, rate in zip(strategy.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def build_strategy(
    settings: StrategySettings,
    recipe: Recipe,
    model: nn.Module,
    evaluator: EvaluationPlugin,
    log: EpochLog,
) -> SupervisedTemplate:
    """An Avalanche strategy with optimizer and learning rate schedule.

    Training can be resumed, and batches come from tensors where the data allow it.

    :raises ValueError: if a user-defined class cannot be found or created.
    """
    model.to(recipe.device)
    optimizer = settings.make_optimizer(model)
    method = settings.build()
    cosine = CosinePlugin(settings.final_lr_factor or recipe.final_lr_factor)
    base = method.strategy
    precision = used_precision(recipe.precision, recipe.device)
    mixins: list[type] = [Resumable] if precision == "float32" else [Resumable, Autocast]
    if not issubclass(base, TensorBatches):
        mixins.append(TensorBatches)
    cls = type(base.__name__, (*mixins, base), {"__module__": base.__module__})
    plugins = [*method.plugins, cosine, MemoryFootprint(), log]
    given = {
        "train_mb_size": recipe.train_mb_size,
        "train_epochs": settings.epochs or recipe.epochs,
        "evaluator": evaluator,
    }
    try:
        strategy = cls(
            model=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            eval_mb_size=recipe.eval_mb_size,
            device=recipe.device,
            plugins=[*plugins],
            **given,
            **method.arguments,
        )
    except TypeError as error:
        raise ValueError(f"{base.__name__} cannot be created: {error}") from error
    lost = [name for name, value in given.items() if getattr(strategy, name) != value]
    lost += ["plugins"] * any(plugin not in strategy.plugins for plugin in plugins)
    if lost:
        raise ValueError(
            f"the constructor of {base.__name__} must pass on {', '.join(lost)} to its base class"
        )
    return strategy
