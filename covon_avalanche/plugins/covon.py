"""CoVON in an Avalanche strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covon_avalanche.merging.batch_norm import trained_batch_norms, update_batch_norm
from covon_avalanche.merging.regmean import InputMoments
from covon_avalanche.optim import CoVON
from covon_avalanche.optim.checks import check_positive, check_whole
from covon_avalanche.optim.diagnostics import Diagnostics
from covon_avalanche.plugins.boundaries import task_data
from covon_avalanche.plugins.plateau import LossPlateau
from covon_avalanche.plugins.posterior import PosteriorPlugin
from covon_avalanche.plugins.schedule import Schedule
from covon_avalanche.plugins.task_batches import task_batches
from covon_avalanche.posterior.fisher import ExampleSquares, track_example_squares

_PASS_MB_SIZE = 64  # of passes for the layers' inputs: patches of images take much memory


class CoVONPlugin(PosteriorPlugin):
    """Fast and slow variational continual learning; needs a ``CoVON`` optimizer.

    Merges the task's posterior into the slow prior after each experience (Eq. 8), or, for
    streams without boundaries, whenever ``consolidate_every`` or ``plateau`` says so. Task
    identities are not used. See :class:`PosteriorPlugin` for the order of plugins.

    Where the model has batch norm, its running statistics are estimated anew after the merge at the
    end of a task, in one pass over the task's data: they would be those of noisy, unmerged weights.
    """

    optimizer_class = CoVON
    scheduled = frozenset({"lr", "ess", "hess_init", "gamma", "gamma_precision", "epochs"})

    def __init__(
        self,
        *,
        gamma: float | None = None,
        ess_per_example: float | None = None,
        schedule: Schedule | None = None,
        eval_samples: int = 0,
        consolidate_every: int | None = None,
        plateau: LossPlateau | None = None,
        merge_by_inputs: bool = False,
    ) -> None:
        """
        :param gamma: merging coefficient, instead of the optimizer's.
        :param ess_per_example: sets ``ess`` at the start of each task to this times the task's
            training examples, so that every example counts alike whatever its domain. 1 is
            Bayes' rule, above it a "cold" posterior of temperature ``1 / ess_per_example``. The
            schedule may overrule it for a task.
        :param schedule: per-experience ``lr``, ``ess``, ``hess_init``, ``gamma``,
            ``gamma_precision``, ``epochs``: a list of dicts, a dict of dicts by experience, or a
            callable of the index.
        :param eval_samples: posterior samples to predict with in ``strategy.eval``; 0
            predicts with the mean weights.
        :param consolidate_every: merge every so many optimizer steps instead of after each
            experience (section 3.2 of the paper). ``ess`` should then be the examples seen
            in that many steps. The steps after the last merge stay unmerged; call
            ``strategy.optimizer.consolidate()`` at the end if you want them in.
        :param plateau: merge when the training loss has reached a plateau instead.
        :param merge_by_inputs: merge the means of Linear and Conv2d layers by what they see
            instead of by Eq. 8, see :mod:`covon_avalanche.merging.regmean`: two more forward passes
            over the task's data, and a matrix of inputs by inputs for each layer. It forgets
            far less where Eq. 8 has to choose between keeping and learning, as on PACS.
        """
        super().__init__(schedule=schedule, eval_samples=eval_samples)
        if consolidate_every is not None:
            check_whole("consolidate_every", consolidate_every)
        if consolidate_every is not None and plateau is not None:
            raise ValueError("give consolidate_every or plateau, not both")
        self.consolidate_every = consolidate_every
        self.plateau = plateau
        if merge_by_inputs and self.task_free:
            raise ValueError("merge_by_inputs needs the data of a task, so tasks with boundaries")
        if ess_per_example is not None and self.task_free:
            raise ValueError(
                "ess_per_example follows the sizes of tasks: without boundaries give the "
                "optimizer the ess of the examples between two merges"
            )
        if ess_per_example is not None:
            check_positive("ess_per_example", ess_per_example)
        self.gamma = gamma
        self.ess_per_example = ess_per_example
        self.moments = InputMoments() if merge_by_inputs else None
        """Of the layers' inputs in all tasks so far."""
        self.diagnostics: dict[str, Diagnostics] = {}
        """Those of the optimizer just before the last merge."""
        self._squares: ExampleSquares | None = None
        self._steps = 0
        self._gamma_is_set = False

    @property
    def task_free(self) -> bool:
        """Whether steps or loss decide when to consolidate, not the end of an experience."""
        return self.consolidate_every is not None or self.plateau is not None

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Set ``gamma`` once, for the first task on; the schedule may overrule it."""
        if self.gamma is not None and not self._gamma_is_set:
            self._set(strategy, {"gamma": self.gamma})
            self._gamma_is_set = True
        super().before_training_exp(strategy, **kwargs)
        self._stop_tracking()
        if strategy.optimizer.hess_approx == "per_example":
            self._squares = track_example_squares(strategy.model)

    def _settings(self, strategy: Any) -> Mapping[str, Any]:
        found = super()._settings(strategy)
        if self.ess_per_example is None:
            return found
        return {"ess": self.ess_per_example * len(task_data(strategy.experience)), **found}

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Tell the optimizer the size of the batch, and replace the weights by a sample."""
        for group in strategy.optimizer.param_groups:
            group["batch_size"] = len(strategy.mb_y)
        super().before_forward(strategy, **kwargs)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Consolidate at the end of a task."""
        self._stop_tracking()
        super().after_training_exp(strategy, **kwargs)

    def _consolidate(self, strategy: Any) -> None:
        optimizer, model = strategy.optimizer, strategy.model
        self.diagnostics = optimizer.diagnostics()
        means = None
        if self.moments is not None:
            old = optimizer.prior(model.named_parameters()).mean
            means = self.moments.merged(model, old, task_batches(strategy, _PASS_MB_SIZE))
        optimizer.consolidate(means=means)
        if not self.task_free and trained_batch_norms(model):
            batches = task_batches(strategy, strategy.train_mb_size, shuffled=True)
            update_batch_norm(model, batches)
        if self.moments is not None:
            self.moments.add(model, task_batches(strategy, _PASS_MB_SIZE))

    def _stop_tracking(self) -> None:
        if self._squares is not None:
            self._squares.remove()
            self._squares = None

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Without task boundaries: merge if it is time."""
        self._steps += 1
        due = self.consolidate_every is not None and self._steps % self.consolidate_every == 0
        if self.plateau is not None:
            due = self.plateau.update(strategy.loss.item())
        if due:
            self._consolidate(strategy)
