"""CoVON in an Avalanche strategy."""

from __future__ import annotations

from typing import Any, get_args

from avalanche.distributed import DistributedHelper

from covon_avalanche.checks import check_choice, check_whole
from covon_avalanche.merging import MergeRule, merge_into
from covon_avalanche.optim import CoVON
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.optim.diagnostics import Diagnostics
from covon_avalanche.plugins.merge import merge_task
from covon_avalanche.plugins.posterior import PosteriorPlugin


class CoVONPlugin(PosteriorPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Fast and slow variational continual learning; needs a ``CoVON`` optimizer.

    Merges the task's posterior into the slow prior after each experience, or, for streams
    without task boundaries, after every ``consolidate_every`` steps. Task identities are not
    used. See :class:`PosteriorPlugin` for the order of plugins.

    Where the model has batch norm, its running statistics are re-estimated after the merge at the
    end of a task, in one pass over the task's data, because the old statistics came from sampled,
    unmerged weights.
    """

    optimizer_class = CoVON

    def __init__(
        self,
        *,
        merge: MergeRule | SlowStep = "eq8",
        eval_samples: int = 0,
        eval_temperature: float = 1.0,
        consolidate_every: int | None = None,
    ) -> None:
        """
        :param merge: the slow step: ``"eq8"``, or ``"replace"`` or ``"none"``, its ablations, as in
            :meth:`CoVON.consolidate`; or a rule of ``covon_avalanche.merging`` for the merged mean.
            ``RegMean()`` has a higher accuracy where Eq. 8 cannot both retain earlier tasks and
            learn the new one, as on PACS. With any rule the merged precision is that of Eq. 8:
            ``posterior()``, samples for prediction and the next prior are N(merged weights,
            1 / precision).
        :param consolidate_every: merge each time this number of optimizer steps has passed, instead
            of after each experience (section 3.2 of the paper). The optimizer's ``examples`` are
            then those of as many full steps, whatever the size of an experience; in the paper's
            units ``ess`` should be as large. Steps after the last merge stay unmerged; call
            ``strategy.optimizer.consolidate()`` at the end to merge them.

        See :class:`PosteriorPlugin` for ``eval_samples`` and ``eval_temperature``.
        """
        super().__init__(eval_samples=eval_samples, eval_temperature=eval_temperature)
        if not isinstance(merge, MergeRule):
            check_choice("merge, unless a rule such as RegMean(),", merge, get_args(SlowStep))
        self.merge = merge
        """How to merge, and what is remembered of earlier tasks."""
        self.consolidate_every = consolidate_every
        self._examples = self._steps = 0
        self.diagnostics: dict[str, Diagnostics] = {}
        """The optimizer's diagnostics just before the last merge."""
        if consolidate_every is None:
            return
        check_whole("consolidate_every", consolidate_every)
        if not isinstance(merge, MergeRule):
            return
        if merge.needs_data or type(merge).begin_task is not MergeRule.begin_task:
            raise ValueError(
                f"{type(merge).__name__} merges whole tasks: it cannot merge within one "
                "(consolidate_every)"
            )

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Tell the optimizer the number of examples of a task, or between merges, restore the state
        as :class:`PosteriorPlugin` does, and set the weights from which the merge rule lets
        training start."""
        size = len(strategy.adapted_dataset)
        if self.consolidate_every is not None:
            of_step = strategy.train_mb_size * getattr(strategy, "accumulate", 1)
            size = self.consolidate_every * of_step * DistributedHelper.world_size
        for group in strategy.optimizer.param_groups:
            group["examples"] = float(size)
        super().before_training_exp(strategy, **kwargs)
        if isinstance(self.merge, MergeRule):
            self.merge.begin_task(strategy.model)

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Tell the optimizer the number of examples of the step so far, over all processes, and
        replace the weights by a sample."""
        if self._sample is None:  # the first mini-batch of a step
            self._examples = 0
        self._examples += len(strategy.mb_y) * DistributedHelper.world_size
        for group in strategy.optimizer.param_groups:
            group["batch_size"] = self._examples
        super().before_forward(strategy, **kwargs)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Merge if ``consolidate_every`` steps have passed."""
        self._steps += 1
        if self.consolidate_every is not None and self._steps % self.consolidate_every == 0:
            self._consolidate(strategy)

    def _consolidate(self, strategy: Any) -> None:
        self.diagnostics = strategy.optimizer.diagnostics()
        if self.consolidate_every is None:
            merge_task(strategy, self.merge)
        else:
            merge_into(strategy.model, strategy.optimizer, self.merge)
