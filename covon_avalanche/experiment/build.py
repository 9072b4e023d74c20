"""From a recipe to Avalanche objects."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from avalanche.benchmarks import CLScenario
from avalanche.models import SimpleMLP
from avalanche.training.plugins import (
    EvaluationPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    SupervisedPlugin,
)
from avalanche.training.supervised import EWC, JointTraining, Naive
from avalanche.training.templates import SupervisedTemplate
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from covon_avalanche import optim, streams
from covon_avalanche.backbones import create_backbone
from covon_avalanche.evaluation.domain_metrics import DomainMetrics
from covon_avalanche.evaluation.memory import KeptTensors
from covon_avalanche.experiment import recipe as recipes
from covon_avalanche.plugins import EVCLPlugin, SIPlugin, TDVCLPlugin
from covon_avalanche.strategies import (
    AdaRegStrategy,
    CoVONStrategy,
    EWCStarStrategy,
    VCLStrategy,
)
from covon_avalanche.tensor_batches import TensorBatches

_FOLDERS = {"PACS": "PACS", "DomainNet": "domainnet", "CDDB": "CDDB", "CORe50": "core50"}


def build_benchmark(
    stream: recipes.Stream,
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
    if isinstance(stream, recipes.PermutedStream):
        if stream.name == "PermutedMNIST":
            options["dataset_root"] = dataset_root
        return build(stream.n_experiences, **options)
    train, evaluation = streams.image_transforms(stream.image_size)
    root = None if dataset_root is None else Path(dataset_root) / _FOLDERS[stream.name]
    return build(dataset_root=root, train_transform=train, eval_transform=evaluation, **options)


def build_model(
    model: recipes.Model,
    benchmark: CLScenario,
    dataset_root: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """The recipe's network, with inputs and outputs as the benchmark needs them."""
    if isinstance(model, recipes.Perceptron):
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


class FastNaive(TensorBatches, Naive):
    """Avalanche's Naive with batches from tensors, as our own strategies have them."""


class FastEWC(TensorBatches, EWC):
    """Avalanche's EWC with batches from tensors."""


class FastJointTraining(TensorBatches, JointTraining):
    """Avalanche's joint training with batches from tensors."""


class Cosine:
    """Factor of the learning rate in an epoch, from 1 down to ``final`` along a cosine."""

    def __init__(self, epochs: int, final: float) -> None:
        self.epochs, self.final = epochs, final

    def __call__(self, epoch: int) -> float:
        progress = min(epoch / max(1, self.epochs - 1), 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


def build_strategy(
    settings: recipes.Strategy, recipe: recipes.Recipe, model: nn.Module, metrics: DomainMetrics
) -> SupervisedTemplate:
    """An Avalanche strategy with optimizer, LR schedule and metrics."""
    optimizer = _optimizer(settings, model)
    schedule = LambdaLR(optimizer, Cosine(recipe.epochs, recipe.final_lr_factor))
    common: dict[str, Any] = dict(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=recipe.train_mb_size,
        train_epochs=recipe.epochs,
        eval_mb_size=1024,
        plugins=[*_plugins(settings), LRSchedulerPlugin(schedule), KeptTensors()],
        evaluator=EvaluationPlugin(metrics),
    )
    match settings:
        case recipes.Joint():
            return FastJointTraining(**common)
        case recipes.EWC():
            return FastEWC(ewc_lambda=settings.ewc_lambda, **common)
        case recipes.EWCStar():
            return EWCStarStrategy(
                strength=settings.strength,
                weight_decay=settings.weight_decay,
                fisher=settings.fisher,
                **common,
            )
        case recipes.AdaReg():
            return AdaRegStrategy(
                strength=settings.strength, weight_decay=settings.weight_decay, **common
            )
        case recipes.CoVON():
            return CoVONStrategy(schedule=_schedule(settings), **common)
        case recipes.VCL() if settings.kind == "vcl":
            return VCLStrategy(**common)
    return FastNaive(**common)


def _schedule(settings: recipes.CoVON) -> list[dict[str, float]]:
    if settings.schedule:
        return [task.model_dump(exclude_none=True) for task in settings.schedule]
    later = settings.later_hess_init or settings.hess_init
    return [{"hess_init": settings.hess_init}, {"hess_init": later}]


def _plugins(settings: recipes.Strategy) -> list[SupervisedPlugin]:
    """What makes Avalanche's Naive the method, where no strategy has it built in."""
    match settings:
        case recipes.LwF():
            return [LwFPlugin(settings.alpha, settings.temperature)]
        case recipes.SI():
            return [SIPlugin(si_lambda=settings.si_lambda)]
        case recipes.EVCL():
            return [EVCLPlugin(strength=settings.strength)]
        case recipes.TDVCL():
            return [
                TDVCLPlugin(
                    n_steps=settings.n_steps,
                    decay=settings.decay,
                    replay_tasks=settings.replay_tasks,
                    replay_examples=settings.replay_examples,
                    replay_mb_size=settings.replay_mb_size,
                )
            ]
    return []


def _optimizer(settings: recipes.Strategy, model: nn.Module) -> torch.optim.Optimizer:
    match settings:
        case recipes.CoVON():
            return optim.CoVON(
                model.named_parameters(),
                lr=settings.lr,
                ess=settings.ess,
                hess_init=settings.hess_init,
                betas=(0.9, settings.beta2),
                weight_decay=settings.weight_decay,
                gamma=settings.gamma,
                gamma_precision=settings.gamma_precision,
                clip_radius=settings.clip_radius,
                prior_mean=settings.prior_mean,
                hess_approx=settings.hess_approx,
                consolidation=settings.consolidation,
                mc_samples=settings.mc_samples,
            )
        case recipes.VCL():
            return optim.BayesByBackprop(
                model.named_parameters(),
                lr=settings.lr,
                ess=settings.ess,
                std_init=settings.std_init,
                weight_decay=settings.weight_decay,
            )
        case recipes.EWCStar() | recipes.AdaReg():  # weight decay is the plugin's first prior
            weight_decay = 0.0
        case _:
            weight_decay = settings.weight_decay
    return torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=weight_decay, fused=True
    )
