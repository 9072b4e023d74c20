"""From a recipe's settings of a strategy to an Avalanche strategy."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import torch
from avalanche.training.plugins import (
    AGEMPlugin,
    EvaluationPlugin,
    GEMPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    MASPlugin,
    ReplayPlugin,
    RWalkPlugin,
    SupervisedPlugin,
)
from avalanche.training.supervised import (
    DER,
    ER_ACE,
    EWC,
    Cumulative,
    JointTraining,
    Naive,
)
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from covon_avalanche import optim
from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.experiment import strategy_settings as known
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.resumable import Resumable
from covon_avalanche.plugins import EVCLPlugin, ICaRLPlugin, SIPlugin, TDVCLPlugin
from covon_avalanche.strategies import (
    AdaRegStrategy,
    CoVONStrategy,
    EWCStarStrategy,
    VCLStrategy,
)


class Autocast:
    """Mixin for strategies: the model computes in bfloat16, losses and weights stay float32."""

    def forward(self) -> Tensor:
        """The model's output, as float32."""
        strategy: Any = self
        with torch.autocast(strategy.device.type, torch.bfloat16):
            output: Tensor = super().forward()  # type: ignore[misc]
        return output.float()


class Cosine:
    """Factor of the learning rate in an epoch, from 1 down to ``final`` along a cosine."""

    def __init__(self, epochs: int, final: float) -> None:
        self.epochs, self.final = epochs, final

    def __call__(self, epoch: int) -> float:
        progress = min(epoch / max(1, self.epochs - 1), 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


class CosinePlugin(LRSchedulerPlugin):
    """Lets the learning rate fall within each domain, over as many epochs as it has."""

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        """Take over the number of epochs: a schedule may have changed it for this domain."""
        for cosine in self.scheduler.lr_lambdas:
            cosine.epochs = strategy.train_epochs


def build_strategy(
    settings: known.Strategy,
    recipe: Recipe,
    model: nn.Module,
    evaluator: EvaluationPlugin,
    log: EpochLog,
) -> SupervisedTemplate:
    """An Avalanche strategy with optimizer and LR schedule.

    Training can be resumed, and batches come from tensors where the data allow it.

    :raises ValueError: if a class of the user's cannot be found or built.
    """
    model.to(recipe.device)
    optimizer = _optimizer(settings, model)
    cosine = CosinePlugin(_cosine_of(optimizer, recipe))
    cls, own, plugins = _method(settings)
    mixins: list[type] = [Resumable] if recipe.precision == "float32" else [Resumable, Autocast]
    mixins += [] if issubclass(cls, TensorBatches) else [TensorBatches]
    made = type(cls.__name__, (*mixins, cls), {"__module__": cls.__module__})
    try:
        strategy = made(
            model=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=recipe.train_mb_size,
            train_epochs=recipe.epochs,
            eval_mb_size=recipe.eval_mb_size,
            device=recipe.device,
            plugins=[*plugins, cosine, MemoryFootprint(), log],
            evaluator=evaluator,
            **own,
        )
    except TypeError as error:
        if settings.kind != "custom":
            raise
        raise ValueError(f"{settings.implementation} cannot be made: {error}") from error
    if strategy.optimizer is not optimizer:  # a class of the user's may make its own
        cosine.scheduler = _cosine_of(strategy.optimizer, recipe)
    return strategy


def _cosine_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> LambdaLR:
    return LambdaLR(optimizer, Cosine(recipe.epochs, recipe.final_lr_factor))


Method = tuple[type[SupervisedTemplate], dict[str, Any], list[SupervisedPlugin]]


def _method(settings: known.Strategy) -> Method:
    """The strategy's class, its own arguments, and plugins that make it the method."""
    match settings:
        case known.Finetune():
            return Naive, {}, []
        case known.Joint():
            return JointTraining, {}, []
        case known.Cumulative():
            return Cumulative, {}, []
        case known.EWC():
            return EWC, {"ewc_lambda": settings.ewc_lambda}, []
        case known.DER():
            return DER, _only(settings, "mem_size", "alpha", "beta", "batch_size_mem"), []
        case known.ERACE():
            return ER_ACE, _only(settings, "mem_size", "batch_size_mem"), []
        case known.EWCStar():
            return EWCStarStrategy, _only(settings, "strength", "weight_decay", "fisher"), []
        case known.AdaReg():
            return AdaRegStrategy, _only(settings, "strength", "weight_decay"), []
        case known.CoVON():
            own = {"schedule": _schedule(settings), **_only(settings, "ess_per_example")}
            own["merge_by_inputs"] = settings.consolidation == "inputs"
            return CoVONStrategy, own, []
        case known.VCL() if settings.kind == "vcl":
            return VCLStrategy, {}, []
        case known.Custom():
            return _custom(settings)
    return Naive, {}, [_plugin(settings)]


def _only(settings: known.Strategy, *names: str) -> dict[str, Any]:
    return settings.model_dump(include=set(names))


def _plugin(settings: known.Strategy) -> SupervisedPlugin:
    """What makes Avalanche's Naive the method."""
    match settings:
        case known.Replay():
            return ReplayPlugin(settings.mem_size)
        case known.ICaRL():
            return ICaRLPlugin(settings.mem_size)
        case known.GEM():
            return GEMPlugin(settings.patterns_per_exp, settings.memory_strength)
        case known.AGEM():
            return AGEMPlugin(settings.patterns_per_exp, settings.sample_size)
        case known.MAS():
            return MASPlugin(settings.lambda_reg, settings.alpha)
        case known.RWalk():
            return RWalkPlugin(**_only(settings, "ewc_lambda", "ewc_alpha", "delta_t"))
        case known.LwF():
            return LwFPlugin(settings.alpha, settings.temperature)
        case known.SI():
            return SIPlugin(si_lambda=settings.si_lambda)
        case known.EVCL():
            return EVCLPlugin(strength=settings.strength)
        case known.TDVCL():
            names = ("n_steps", "decay", "replay_tasks", "replay_examples", "replay_mb_size")
            return TDVCLPlugin(**_only(settings, *names))
    raise ValueError(f"there is no method {settings.kind!r}")


def _custom(settings: known.Custom) -> Method:
    """The user's class, found in the working directory, too."""
    module, _, name = settings.implementation.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{settings.implementation} cannot be imported: {error}") from error
    if isinstance(cls, type) and issubclass(cls, SupervisedTemplate):
        return cls, dict(settings.arguments), []
    if isinstance(cls, type) and issubclass(cls, SupervisedPlugin):
        try:
            return Naive, {}, [cls(**settings.arguments)]
        except TypeError as error:
            raise ValueError(f"{settings.implementation} cannot be made: {error}") from error
    raise ValueError(
        f"{settings.implementation} must be a subclass of SupervisedTemplate or SupervisedPlugin"
    )


def _schedule(settings: known.CoVON) -> list[dict[str, float]]:
    if settings.schedule:
        return [task.model_dump(exclude_none=True) for task in settings.schedule]
    later = settings.later_hess_init or settings.hess_init
    return [{"hess_init": settings.hess_init}, {"hess_init": later}]


def _optimizer(settings: known.Strategy, model: nn.Module) -> torch.optim.Optimizer:
    match settings:
        case known.CoVON():
            end = settings.consolidation
            return optim.CoVON(
                model.named_parameters(),
                lr=settings.lr,
                ess=settings.ess or 1.0,  # with ess_per_example each domain sets it
                hess_init=settings.hess_init,
                betas=(0.9, settings.beta2),
                weight_decay=settings.weight_decay,
                gamma=settings.gamma,
                gamma_precision=settings.gamma_precision,
                clip_radius=settings.clip_radius,
                prior_mean=settings.prior_mean,
                hess_approx="gradsq" if settings.hess_approx == "auto" else settings.hess_approx,
                consolidation="merge" if end == "inputs" else end,
                mc_samples=settings.mc_samples,
            )
        case known.VCL():
            return optim.BayesByBackprop(
                model.named_parameters(),
                lr=settings.lr,
                ess=settings.ess,
                std_init=settings.std_init,
                weight_decay=settings.weight_decay,
            )
        case known.EWCStar() | known.AdaReg():  # weight decay is the plugin's first prior
            weight_decay = 0.0
        case _:
            weight_decay = settings.weight_decay
    if isinstance(settings, known.WithOptimizer) and settings.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=weight_decay,
        )
    return torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=weight_decay, fused=True
    )
