"""Temporal-difference variational continual learning in an Avalanche strategy."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from avalanche.models import avalanche_forward
from torch import Tensor

from covon_avalanche.checks import check_fraction, check_whole
from covon_avalanche.plugins.posterior import VCLPlugin
from covon_avalanche.posterior.gaussian import DiagGaussian, pool


class TDVCLPlugin(VCLPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """VCL against several past posteriors, with replay; needs a ``BayesByBackprop`` optimizer.

    Melo et al., "Temporal-Difference Variational Continual Learning" (2024). The posterior is
    fitted to a weighted mean of k-step targets, k = 1 to n: target k is the prior of k
    tasks ago with the data of the last k tasks. With weights ``w_k`` that sum to one the
    objective is ``sum_i v_i log p(D_{t-i}) - sum_k w_k KL(q || q_{t-k})`` with ``v_i = sum_{k>i}
    w_k``. Past data are a few stored examples per task: **this method uses replay**.

    The weighted sum of divergences equals one divergence to the pooled posterior
    (:func:`covon_avalanche.posterior.pool`), so that, replay aside, a step costs the same as
    VCL's. Memory is n posteriors. When the model grows, the history starts again.
    """

    def __init__(
        self,
        *,
        n_steps: int = 5,
        decay: float = 1.0,
        replay_tasks: int = 2,
        replay_examples: int = 200,
        replay_mb_size: int = 64,
        **options: Any,
    ) -> None:
        """
        :param n_steps: past posteriors to use; 1 without replay is VCL.
        :param decay: weights are proportional to ``decay ** k``: 1 is the n-step form,
            below 1 TD(lambda) with this lambda.
        :param replay_tasks: number of past tasks to store examples of, at most ``n_steps - 1``.
        :param replay_examples: examples stored per task, drawn at random, after one application
            of the training transform.
        :param replay_mb_size: stored examples per task in a step.
        :param options: see :class:`PosteriorPlugin`.
        """
        super().__init__(**options)
        check_whole("n_steps", n_steps)
        check_whole("replay_mb_size", replay_mb_size)
        check_whole("replay_tasks", replay_tasks, least=0)
        check_whole("replay_examples", replay_examples, least=0)
        check_fraction("decay", decay)
        self.n_steps = n_steps
        self.decay = decay
        self.replay_examples = replay_examples
        self.replay_mb_size = replay_mb_size
        self.posteriors: deque[DiagGaussian] = deque(maxlen=n_steps)
        """Past posteriors, latest last; the first prior counts as one."""
        self._memory: deque[tuple[int, Tensor, Tensor, Tensor]] = deque(
            maxlen=min(replay_tasks, n_steps - 1)
        )
        self._examples = 0  # of the current task

    def weights(self) -> list[float]:
        """``w_k`` of the past posteriors, latest first."""
        powers = [self.decay**k for k in range(max(1, len(self.posteriors)))]
        return [power / sum(powers) for power in powers]

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Pool the past posteriors into the task's prior."""
        super().before_training_exp(strategy, **kwargs)
        self._examples = len(strategy.experience.dataset)
        optimizer, named = strategy.optimizer, dict(strategy.model.named_parameters())
        shapes = {name: p.shape for name, p in named.items()}
        same_model = [q for q in self.posteriors if _shapes(q) == shapes]
        self.posteriors = deque(same_model, self.n_steps)
        if not same_model:  # the first task, or the model has grown
            self.posteriors.append(optimizer.prior(named.items()))
        if len(self.posteriors) == 1:
            return
        pooled = pool(list(reversed(self.posteriors)), self.weights())
        for name, p in named.items():
            if optimizer.state.get(p):  # untrained parameters keep the first prior
                optimizer.state[p]["prior_mean"] = pooled.mean[name].to(p)
                optimizer.state[p]["prior_precision"] = pooled.precision[name].to(p)

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add the loss on stored examples of past tasks, at the current weight sample."""
        weights = self.weights()
        for i, (examples, x, y, task) in enumerate(reversed(self._memory), start=1):
            rows = torch.randint(len(y), (min(self.replay_mb_size, len(y)),), device="cpu")
            x, y, task = (part[rows].to(strategy.device) for part in (x, y, task))
            loss = strategy._criterion(avalanche_forward(strategy.model, x, task), y)
            strategy.loss += sum(weights[i:]) * examples / self._examples * loss

    def _consolidate(self, strategy: Any) -> None:
        super()._consolidate(strategy)
        # The consolidated posterior, unlike posterior() over untrained parameters, too.
        self.posteriors.append(strategy.optimizer.prior(strategy.model.named_parameters()))
        if self.replay_examples and self._memory.maxlen:
            data = strategy.experience.dataset
            labelled = hasattr(strategy.experience, "task_labels")  # a benchmark may have none
            self._memory.append((len(data), *_some(data, self.replay_examples, labelled)))


def _shapes(q: DiagGaussian) -> dict[str, torch.Size]:
    return {name: mean.shape for name, mean in q.mean.items()}


def _some(data: Any, n: int, labelled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Random examples: inputs, targets, task labels."""
    rows = [data[i] for i in torch.randperm(len(data), device="cpu")[:n].tolist()]
    x = torch.stack([torch.as_tensor(row[0], device="cpu") for row in rows])
    y = torch.stack([torch.as_tensor(row[1], device="cpu") for row in rows])
    labels = [int(row[-1]) if labelled else 0 for row in rows]
    task = torch.tensor(labels, dtype=torch.int64, device="cpu")
    return x, y, task
