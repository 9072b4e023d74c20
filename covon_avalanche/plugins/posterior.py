"""Sampling, stepping and consolidation with a posterior optimizer in an Avalanche strategy."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any, ClassVar

import torch
from avalanche.training import plugins as avalanches
from avalanche.training.plugins import EarlyStoppingPlugin, SupervisedPlugin
from avalanche.training.templates.update_type import SGDUpdate
from torch import Tensor
from torch.nn import CrossEntropyLoss

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.optim import BayesByBackprop, PosteriorOptimizer
from covon_avalanche.plugins.task_loader import check_whole_task

_READERS = (
    *(avalanches.BiCPlugin, avalanches.CWRStarPlugin, avalanches.EWCPlugin, avalanches.LFLPlugin),
    *(avalanches.FeatureDistillationPlugin, avalanches.LwFPlugin, avalanches.MASPlugin),
    *(avalanches.CurrentDataFeCAMUpdate, avalanches.MemoryFeCAMUpdate, avalanches.RWalkPlugin),
    *(avalanches.CurrentDataNCMUpdate, avalanches.MemoryNCMUpdate),
    avalanches.SynapticIntelligencePlugin,
)
"""Avalanche's plugins that use the weights at the end of a task."""


class PosteriorPlugin(SupervisedPlugin):
    """Base of :class:`CoVONPlugin` and :class:`VCLPlugin`.

    Samples the weights before each forward pass, restores the mean before the update, and
    consolidates after each experience. Give it to the strategy *before* other plugins, so that
    they see the consolidated weights at the end of an experience.

    It also preserves the posterior when Avalanche resets the optimizer: at the first ``train``
    the optimizer's state is cleared, and when a classifier grows its parameters are replaced.

    An exception in the middle of a step leaves the weights at a sample until the next
    ``train`` or ``eval``, or until you call ``strategy.optimizer.discard_samples()``;
    ``covon_avalanche.CoVONStrategy`` calls it itself.

    With ``eval_every=1`` the last evaluation inside ``train`` comes before the merge; call
    ``strategy.eval`` afterwards to evaluate the merged weights.
    """

    optimizer_class: ClassVar[type[PosteriorOptimizer]]
    consolidate_every: int | None = None

    def __init__(
        self,
        *,
        eval_samples: int = 0,
        eval_temperature: float = 1.0,
    ) -> None:
        """
        :param eval_samples: predict in ``strategy.eval`` with class probabilities averaged
            over this many posterior samples (the output becomes log-probabilities). 0 predicts
            with the mean weights, as does every evaluation before ``ess`` is known. Classes are the
            last dimension of the output, or the second one with ``CrossEntropyLoss``.
        :param eval_temperature: factor of the posterior's variance in these predictions. With an
            ``ess`` far above the number of examples the posterior is too narrow to be uncertain
            about anything. Choose the temperature with the lowest log loss on validation images.
        """
        super().__init__()
        check_whole("eval_samples", eval_samples, least=0)
        check_positive("eval_temperature", eval_temperature)
        self.eval_samples = eval_samples
        self.eval_temperature = eval_temperature
        self._saved: dict[str, dict[str, Any]] = {}
        self._sample: AbstractContextManager[None] | None = None
        self._best: tuple[Any, Any] = None, None  # weights of early stopping, and their state
        self._draws = 0  # of the optimizer, before an evaluation
        self._has_trained = False
        self._has_sampled = False  # in this experience

    # Training --------------------------------------------------------------------------

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Check that optimizer and strategy fit together."""
        optimizer = strategy.optimizer
        if not isinstance(optimizer, self.optimizer_class):
            raise ValueError(
                f"{type(self).__name__} needs a {self.optimizer_class.__name__} optimizer, "
                f"got {type(optimizer).__name__}"
            )
        check_order(self, strategy)
        if getattr(strategy._criterion, "reduction", "mean") == "sum":
            warnings.warn("the criterion must average over the batch, got a sum", stacklevel=2)
        self._discard(strategy)
        owner = next(c for c in type(strategy).__mro__ if "training_epoch" in vars(c))
        if optimizer.mc_samples > 1 and owner is not SGDUpdate:
            raise ValueError(
                f"mc_samples={optimizer.mc_samples} repeats the forward and backward passes of "
                f"Avalanche's training loop, but {owner.__name__} has its own loop: use "
                "mc_samples=1"
            )

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Save the states by name, before Avalanche adapts model and optimizer."""
        self._save_states(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the state of cleared or grown parameters.

        :raises ValueError: for an optimizer that does not know the strategy's earlier tasks.
        """
        if self.consolidate_every is None:
            check_whole_task(strategy.experience)
        self._has_sampled = False
        optimizer = strategy.optimizer
        knows_tasks = any(optimizer.state.values()) or optimizer.param_groups[0]["noise_draws"]
        if self._has_trained and strategy.clock.train_exp_counter > 0 and not knows_tasks:
            raise ValueError(
                f"the strategy has a new {type(optimizer).__name__}, without the posterior of its "
                "earlier tasks: keep one optimizer for all (SchedulePlugin changes its settings), "
                "give the new one their posterior as its prior, or make a new strategy"
            )
        self._restore_states(strategy)

    def _save_states(self, strategy: Any) -> None:
        known = strategy.optimized_param_id or dict(strategy.model.named_parameters())
        state = strategy.optimizer.state
        self._saved = {name: state[p] for name, p in known.items() if state.get(p)}

    def _restore_states(self, strategy: Any) -> None:
        optimizer = strategy.optimizer
        names = {named.param: named.name for named in optimizer._named_params()}  # also of a loss
        for name, p in strategy.model.named_parameters():
            names[p] = name
            if name in self._saved and not optimizer.state.get(p):
                optimizer.restore_state(p, self._saved[name])
        self._saved = {}
        for group in optimizer.param_groups:  # Avalanche replaces the parameters, not their names
            if "param_names" in group:
                group["param_names"] = [names[p] for p in group["params"]]

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Replace the weights by a sample, unless that of the step is in place already."""
        if self._sample is None:
            if strategy._stop_training:  # after an iteration: Avalanche trains one more
                self._follow_early_stopping(strategy)
            for plugin in strategy.plugins:
                best = getattr(plugin, "best_state", None)
                if isinstance(plugin, EarlyStoppingPlugin) and best is not self._best[0]:
                    self._best = best, best and copy.deepcopy(strategy.optimizer.state_dict())
            self._sample = strategy.optimizer.sampled_params()
            self._sample.__enter__()
            self._has_sampled = True

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the mean, and run the other samples of this step."""
        self._close_sample()
        for _ in range(strategy.optimizer.mc_samples - 1):
            strategy.loss = strategy._make_empty_loss()
            strategy._before_forward(**kwargs)  # opens the next sample, as above
            strategy.mb_output = strategy.forward()
            strategy._after_forward(**kwargs)
            strategy.loss += strategy.criterion()
            strategy._before_backward(**kwargs)
            strategy.backward()
            strategy._after_backward(**kwargs)
            self._close_sample()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Refuse a training loop that never samples, such as that of Avalanche's LaMAML."""
        if not self._has_sampled:
            raise ValueError(
                f"the training loop of {type(strategy).__name__} does not use samples of "
                f"{type(strategy.optimizer).__name__}, because it never calls before_forward: "
                "use another strategy, or an optimizer without a posterior"
            )

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Consolidate at the end of a task, with the state of the weights that Avalanche's early
        stopping has restored."""
        self._has_trained = strategy.optimizer.param_groups[0]["noise_draws"] > 0
        self._follow_early_stopping(strategy)
        self._best = None, None
        if self.consolidate_every is None:
            self._consolidate(strategy)

    def _follow_early_stopping(self, strategy: Any) -> None:
        saved = self._best[1]
        if saved and strategy.optimizer.changed_weights():
            strategy.optimizer.rewind(saved)

    def _consolidate(self, strategy: Any) -> None:
        strategy.optimizer.consolidate()

    # Prediction ------------------------------------------------------------------------

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the mean if interrupted training left a sample in place."""
        if isinstance(strategy.optimizer, self.optimizer_class):
            self._discard(strategy)
            if strategy.optimized_param_id is None:  # as in the first ``train``
                self._remake_optimizer(strategy)
            self._draws = strategy.optimizer.param_groups[0]["noise_draws"]

    def before_eval_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Give the optimizer the parameters of a model that grew in an evaluation."""
        known = strategy.optimized_param_id
        if known and any(known.get(n) is not p for n, p in strategy.model.named_parameters()):
            self._remake_optimizer(strategy)

    def _remake_optimizer(self, strategy: Any) -> None:
        self._save_states(strategy)
        strategy.make_optimizer()
        self._restore_states(strategy)

    def before_eval_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Replace the weights by a sample, with ``eval_samples``; the same for all batches."""
        if self._averages_samples(strategy):
            strategy.optimizer.param_groups[0]["noise_draws"] = self._draws
            self._sample = strategy.optimizer.sampled_params(False, self.eval_temperature)
            self._sample.__enter__()

    def after_eval_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Average the probabilities over the samples."""
        if not self._averages_samples(strategy):
            return
        self._close_sample()
        outputs = [strategy.mb_output]
        for _ in range(self.eval_samples - 1):
            with strategy.optimizer.sampled_params(False, self.eval_temperature):
                outputs.append(strategy.forward())
        classes = 1 if isinstance(strategy._criterion, CrossEntropyLoss) else -1
        _check_classes(outputs[0].shape, classes, strategy.mb_y)
        log_probabilities = torch.stack([output.log_softmax(classes) for output in outputs])
        strategy.mb_output = log_probabilities.logsumexp(0) - math.log(len(outputs))

    def _averages_samples(self, strategy: Any) -> bool:
        return self.eval_samples > 0 and strategy.optimizer.can_sample

    def _discard(self, strategy: Any) -> None:
        self._sample = None
        strategy.optimizer.discard_samples()

    def _close_sample(self) -> None:
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.__exit__(None, None, None)


def reads_merged_weights(plugin: SupervisedPlugin) -> bool:
    """Whether a plugin uses the weights at the end of a task, such as EWC for its anchor: it is one
    of Avalanche's that do, or its attribute ``reads_merged_weights`` is true."""
    return getattr(plugin, "reads_merged_weights", isinstance(plugin, _READERS))


def check_order(merging: SupervisedPlugin, strategy: Any) -> None:
    """Raise a ``ValueError`` if a plugin would take the weights from before the merge for those of
    the finished task."""
    for plugin in takewhile(lambda plugin: plugin is not merging, strategy.plugins):
        if reads_merged_weights(plugin):
            raise ValueError(
                f"{type(merging).__name__} must come before {type(plugin).__name__}, which uses "
                "the merged weights at the end of a task"
            )


def _check_classes(shape: torch.Size, classes: int, targets: Tensor) -> None:
    """Raise a ``ValueError`` for targets that are neither class ids nor probabilities, or a single
    output."""
    if not targets.is_floating_point():
        valid = targets.shape != shape and shape[classes] > 1
    else:
        valid = targets.dim() > 1 and torch.allclose(targets.sum(1), targets.new_ones(()))
    if not valid:
        raise ValueError(
            f"eval_samples averages class probabilities, which outputs of shape {tuple(shape)} "
            f"with targets of shape {tuple(targets.shape)} and {targets.dtype} do not have: leave "
            "it at 0"
        )


class VCLPlugin(PosteriorPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Mean-field VCL without coresets; needs a ``BayesByBackprop`` optimizer.

    The posterior after each experience is the prior of the next (Nguyen et al., ICLR 2018;
    Algorithm 4 of the CoVON paper). The authors train with 10 samples of the weights per step
    (``BayesByBackprop(mc_samples=10)``; 1 by default) and average predictions over 100
    (``eval_samples=100``; by default the mean weights predict). Task identities are not used. See
    :class:`PosteriorPlugin` for parameters and plugin order.
    """

    optimizer_class = BayesByBackprop
