"""Ready-made strategies: Avalanche's ``SupervisedTemplate`` with a plugin of this package, and
Avalanche's ER-ACE, made to work in several processes.

Constructors are keyword-only. They take the arguments of the strategy's plugin, which documents
them, and those of ``SupervisedTemplate``: the model (its head may grow), the optimizer, the
criterion (averaged over the batch) and more, with its defaults, except that ``eval_mb_size``
defaults to ``train_mb_size``. ``plugins`` come after the strategy's own plugin, so that they see
the consolidated weights, except for a :class:`MergePlugin`, which comes first. Evaluations inside
``train`` (``eval_every``) come before the merge. Batches are read directly from tensors where the
data allow it, see :class:`TensorBatches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from avalanche.core import BasePlugin
from avalanche.distributed import DistributedHelper
from avalanche.training import ACECriterion
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import ER_ACE
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.utils import cycle
from torch import Tensor
from torch.utils.data import DataLoader

from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.merging import MergeRule
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.plugins import AdaRegPlugin, CoVONPlugin, EWCStarPlugin, MergePlugin, VCLPlugin
from covon_avalanche.plugins.schedule import Schedule


class _PluginStrategy(TensorBatches, SupervisedTemplate):
    """A strategy with a plugin of its own; the other arguments are ``SupervisedTemplate``'s."""

    def __init__(
        self,
        *,
        plugin: SupervisedPlugin,
        plugins: Sequence[BasePlugin] | None = None,
        eval_mb_size: int | None = None,
        **template: Any,
    ) -> None:
        ordered = sorted([plugin, *(plugins or ())], key=lambda p: not isinstance(p, MergePlugin))
        super().__init__(plugins=ordered, eval_mb_size=eval_mb_size, **template)


class _PosteriorStrategy(_PluginStrategy):
    """Restores the mean of the weights when training or evaluation is interrupted."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._restoring_mean():
            return super().train(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        with self._restoring_mean():
            return super().eval(*args, **kwargs)

    @contextmanager
    def _restoring_mean(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if isinstance(self.optimizer, PosteriorOptimizer):
                self.optimizer.discard_samples()
            raise


class CoVONStrategy(_PosteriorStrategy):
    """Fast and slow variational continual learning with a ``CoVON`` optimizer; see
    :class:`CoVONPlugin`."""

    def __init__(
        self,
        *,
        merge: MergeRule | SlowStep = "eq8",
        schedule: Schedule | None = None,
        eval_samples: int = 0,
        eval_temperature: float = 1.0,
        consolidate_every: int | None = None,
        **template: Any,
    ) -> None:
        plugin = CoVONPlugin(
            merge=merge,
            schedule=schedule,
            eval_samples=eval_samples,
            eval_temperature=eval_temperature,
            consolidate_every=consolidate_every,
        )
        super().__init__(plugin=plugin, **template)


class VCLStrategy(_PosteriorStrategy):
    """Mean-field variational continual learning with a ``BayesByBackprop`` optimizer; see
    :class:`VCLPlugin`."""

    def __init__(
        self,
        *,
        schedule: Schedule | None = None,
        eval_samples: int = 0,
        eval_temperature: float = 1.0,
        **template: Any,
    ) -> None:
        plugin = VCLPlugin(
            schedule=schedule, eval_samples=eval_samples, eval_temperature=eval_temperature
        )
        super().__init__(plugin=plugin, **template)


class AdaRegStrategy(_PluginStrategy):
    """AdamW-Regularized, with an optimizer of the Adam family; see :class:`AdaRegPlugin`."""

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule | None = None,
        **template: Any,
    ) -> None:
        plugin = AdaRegPlugin(
            strength=strength, ess=ess, weight_decay=weight_decay, schedule=schedule
        )
        super().__init__(plugin=plugin, **template)


class EWCStarStrategy(_PluginStrategy):
    """EWC with accumulated Fisher information, one anchor and any optimizer; see
    :class:`EWCStarPlugin`."""

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        fisher: Literal["exact", "batch"] = "exact",
        schedule: Schedule | None = None,
        **template: Any,
    ) -> None:
        plugin = EWCStarPlugin(
            strength=strength, ess=ess, weight_decay=weight_decay, fisher=fisher, schedule=schedule
        )
        super().__init__(plugin=plugin, **template)


class ERACEStrategy(ER_ACE):
    """ER-ACE (Caccia et al., 2022): the cross-entropy of the current batch among its own classes,
    plus that of stored examples. Its arguments are Avalanche's, on whose class it is based.

    As in the authors' code, the two losses are added, and a step has as many stored examples as new
    ones; Avalanche halves the sum and uses 10. Replay starts with the second experience, and the
    memory then also has examples of the current one. Classes that are not in the current batch are
    masked, including those that no task has had. Under :class:`DataParallel` the loss is that of
    the whole batch.
    """

    replay_loader: Any

    def __init__(self, *, batch_size_mem: int | None = None, **arguments: Any) -> None:
        """
        :param batch_size_mem: stored examples per step, at most all; ``None``: as many as
            ``train_mb_size``.
        """
        size = batch_size_mem or arguments.get("train_mb_size", 1)
        super().__init__(batch_size_mem=size, **arguments)
        self.ace_criterion = _WholeBatchACE()

    def _before_training_exp(self, **kwargs: Any) -> None:
        super()._before_training_exp(**kwargs)
        own: Any = self
        # Avalanche goes by the index in the stream, not by what was trained, and does not replay at
        # all from fewer examples than a batch has.
        own.replay_loader = None
        if own.clock.train_exp_counter > 0 and len(buffer := own.storage_policy.buffer):
            size = min(own.batch_size_mem, len(buffer))
            loader = DataLoader(buffer, batch_size=size, shuffle=True, drop_last=True)
            own.replay_loader = cycle(loader)


class _WholeBatchACE(ACECriterion):
    """Compares outputs of the classes in any process's share of the batch."""

    def __call__(
        self, out_in: Tensor, target_in: Tensor, out_buffer: Tensor, target_buffer: Tensor
    ) -> Tensor:
        present = F.one_hot(target_in, out_in.shape[1]).amax(0)
        if DistributedHelper.is_distributed:
            dist.all_reduce(present, dist.ReduceOp.MAX)
        current = F.cross_entropy(out_in.masked_fill(present == 0, -torch.inf), target_in)
        return F.cross_entropy(out_buffer, target_buffer) + current


__all__ = ["AdaRegStrategy", "CoVONStrategy", "ERACEStrategy", "EWCStarStrategy", "VCLStrategy"]
