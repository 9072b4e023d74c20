"""Ready strategies: an Avalanche ``SupervisedTemplate`` with the plugin already in it.

Constructors are keyword-only and follow Avalanche's order. The strategy's own plugin comes
before those in ``plugins``, which are copied, so that they see the consolidated weights.
Batches come from tensors where the data allow it, see :class:`TensorBatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from avalanche.core import BasePlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.evaluation import default_evaluator
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.strategy_mixin_protocol import CriterionType
from torch.nn import CrossEntropyLoss, Module
from torch.optim import Optimizer

from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.optim import BayesByBackprop, CoVON
from covon_avalanche.plugins import (
    AdaRegPlugin,
    CoVONPlugin,
    EWCStarPlugin,
    LossPlateau,
    VCLPlugin,
)
from covon_avalanche.plugins.posterior import PosteriorPlugin
from covon_avalanche.plugins.schedule import Schedule

Evaluator: TypeAlias = EvaluationPlugin | Callable[[], EvaluationPlugin]


class _PosteriorStrategy(TensorBatches, SupervisedTemplate):
    """A strategy that leaves the weights at the posterior's mean when it is interrupted."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._mean_after_all():
            return super().train(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        with self._mean_after_all():
            return super().eval(*args, **kwargs)

    @contextmanager
    def _mean_after_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for plugin in self.plugins:
                if isinstance(plugin, PosteriorPlugin):
                    plugin.abandon_sample()
            raise


class CoVONStrategy(_PosteriorStrategy):
    """Fast and slow variational continual learning; see :class:`CoVONPlugin`."""

    def __init__(
        self,
        *,
        model: Module,
        optimizer: CoVON,
        criterion: CriterionType = CrossEntropyLoss(),
        gamma: float | None = None,
        ess_per_example: float | None = None,
        schedule: Schedule | None = None,
        eval_samples: int = 0,
        consolidate_every: int | None = None,
        plateau: LossPlateau | None = None,
        merge_by_inputs: bool = False,
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[BasePlugin] | None = None,
        evaluator: Evaluator = default_evaluator,
        eval_every: int = -1,
        **base_kwargs: Any,
    ) -> None:
        """
        :param model: the model; its head may grow.
        :param optimizer: a :class:`CoVON`.
        :param criterion: loss, averaged over the batch.
        :param gamma: merging coefficient, instead of the optimizer's.
        :param ess_per_example: sets ``ess`` to this times the task's examples, see the plugin.
        :param schedule: per-experience hyperparameters, see the plugin.
        :param eval_samples: posterior samples to predict with; 0 predicts with the mean.
        :param consolidate_every: merge every so many steps, for streams without boundaries.
        :param plateau: merge when the loss has reached a plateau instead.
        :param merge_by_inputs: merge layers by what they see, see the plugin.
        :param train_mb_size: training mini-batch size.
        :param train_epochs: epochs per experience; a schedule may change it.
        :param eval_mb_size: evaluation mini-batch size; by default that of the training.
        :param device: where to train.
        :param plugins: more plugins.
        :param evaluator: metrics and loggers.
        :param eval_every: see Avalanche; evaluations inside ``train`` come before the merge.
        :param base_kwargs: more arguments of ``SupervisedTemplate``.
        """
        plugin = CoVONPlugin(
            gamma=gamma,
            ess_per_example=ess_per_example,
            schedule=schedule,
            eval_samples=eval_samples,
            consolidate_every=consolidate_every,
            plateau=plateau,
            merge_by_inputs=merge_by_inputs,
        )
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            train_mb_size=train_mb_size,
            train_epochs=train_epochs,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=[plugin, *(plugins or ())],
            evaluator=evaluator,
            eval_every=eval_every,
            **base_kwargs,
        )


class VCLStrategy(_PosteriorStrategy):
    """Mean-field variational continual learning; see :class:`VCLPlugin`."""

    def __init__(
        self,
        *,
        model: Module,
        optimizer: BayesByBackprop,
        criterion: CriterionType = CrossEntropyLoss(),
        schedule: Schedule | None = None,
        eval_samples: int = 0,
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[BasePlugin] | None = None,
        evaluator: Evaluator = default_evaluator,
        eval_every: int = -1,
        **base_kwargs: Any,
    ) -> None:
        """
        :param model: the model; its head may grow.
        :param optimizer: a :class:`BayesByBackprop`.
        :param criterion: loss, averaged over the batch.
        :param schedule: per-experience hyperparameters, see the plugin.
        :param eval_samples: posterior samples to predict with; 0 predicts with the mean.
        :param train_mb_size: training mini-batch size.
        :param train_epochs: epochs per experience; a schedule may change it.
        :param eval_mb_size: evaluation mini-batch size; by default that of the training.
        :param device: where to train.
        :param plugins: more plugins.
        :param evaluator: metrics and loggers.
        :param eval_every: see Avalanche; evaluations inside ``train`` come before the merge.
        :param base_kwargs: more arguments of ``SupervisedTemplate``.
        """
        plugin = VCLPlugin(
            schedule=schedule,
            eval_samples=eval_samples,
        )
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            train_mb_size=train_mb_size,
            train_epochs=train_epochs,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=[plugin, *(plugins or ())],
            evaluator=evaluator,
            eval_every=eval_every,
            **base_kwargs,
        )


class AdaRegStrategy(TensorBatches, SupervisedTemplate):
    """AdamW-Regularized; see :class:`AdaRegPlugin`."""

    def __init__(
        self,
        *,
        model: Module,
        optimizer: Optimizer,
        criterion: CriterionType = CrossEntropyLoss(),
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule | None = None,
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[BasePlugin] | None = None,
        evaluator: Evaluator = default_evaluator,
        eval_every: int = -1,
        **base_kwargs: Any,
    ) -> None:
        """
        :param model: the model; its head may grow.
        :param optimizer: one of the Adam family.
        :param criterion: loss, averaged over the batch.
        :param strength: multiplies each task's importance.
        :param ess: effective sample size; by default the size of the experience.
        :param weight_decay: precision per example of the first prior N(0, 1/s0).
        :param schedule: per-experience hyperparameters, see the plugin.
        :param train_mb_size: training mini-batch size.
        :param train_epochs: epochs per experience; a schedule may change it.
        :param eval_mb_size: evaluation mini-batch size; by default that of the training.
        :param device: where to train.
        :param plugins: more plugins.
        :param evaluator: metrics and loggers.
        :param eval_every: see Avalanche; evaluations inside ``train`` come before the merge.
        :param base_kwargs: more arguments of ``SupervisedTemplate``.
        """
        plugin = AdaRegPlugin(
            strength=strength,
            ess=ess,
            weight_decay=weight_decay,
            schedule=schedule,
        )
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            train_mb_size=train_mb_size,
            train_epochs=train_epochs,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=[plugin, *(plugins or ())],
            evaluator=evaluator,
            eval_every=eval_every,
            **base_kwargs,
        )


class EWCStarStrategy(TensorBatches, SupervisedTemplate):
    """EWC with accumulated Fisher and one anchor; see :class:`EWCStarPlugin`."""

    def __init__(
        self,
        *,
        model: Module,
        optimizer: Optimizer,
        criterion: CriterionType = CrossEntropyLoss(),
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        fisher: Literal["exact", "batch"] = "exact",
        fisher_mb_size: int = 256,
        train_transform: bool = False,
        train_mode: bool = False,
        schedule: Schedule | None = None,
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[BasePlugin] | None = None,
        evaluator: Evaluator = default_evaluator,
        eval_every: int = -1,
        **base_kwargs: Any,
    ) -> None:
        """
        :param model: the model; its head may grow.
        :param optimizer: any; the regulariser is decoupled from it.
        :param criterion: loss, averaged over the batch.
        :param strength: multiplies each task's importance.
        :param ess: effective sample size; by default the size of the experience.
        :param weight_decay: precision per example of the first prior N(0, 1/s0).
        :param fisher: exact per-example squares, or squared batch gradients times B.
        :param fisher_mb_size: examples per batch of the Fisher pass.
        :param train_transform: use the training transform in the Fisher pass.
        :param train_mode: run the model in training mode there.
        :param schedule: per-experience hyperparameters, see the plugin.
        :param train_mb_size: training mini-batch size.
        :param train_epochs: epochs per experience; a schedule may change it.
        :param eval_mb_size: evaluation mini-batch size; by default that of the training.
        :param device: where to train.
        :param plugins: more plugins.
        :param evaluator: metrics and loggers.
        :param eval_every: see Avalanche; evaluations inside ``train`` come before the merge.
        :param base_kwargs: more arguments of ``SupervisedTemplate``.
        """
        plugin = EWCStarPlugin(
            strength=strength,
            ess=ess,
            weight_decay=weight_decay,
            fisher=fisher,
            fisher_mb_size=fisher_mb_size,
            train_transform=train_transform,
            train_mode=train_mode,
            schedule=schedule,
        )
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            train_mb_size=train_mb_size,
            train_epochs=train_epochs,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=[plugin, *(plugins or ())],
            evaluator=evaluator,
            eval_every=eval_every,
            **base_kwargs,
        )


__all__ = ["AdaRegStrategy", "CoVONStrategy", "EWCStarStrategy", "VCLStrategy"]
