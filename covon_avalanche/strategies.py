"""Ready-made strategies: CoVON, and Avalanche's ER-ACE as published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.core import BasePlugin
from avalanche.distributed import DistributedHelper
from avalanche.training.supervised import ER_ACE
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.utils import cycle
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader

from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.merging import MergeRule
from covon_avalanche.optim import CoVON
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.plugins import CoVONPlugin


class CoVONStrategy(TensorBatches, SupervisedTemplate):
    """Fast and slow variational continual learning: Avalanche's template with a
    :class:`CoVONPlugin`.

    Besides what the plugin does in any strategy, it reads batches directly from tensors where the
    data allow it (:class:`TensorBatches`), and an exception or Ctrl-C in ``train`` or ``eval``
    leaves the weights at the mean.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: CoVON,
        criterion: Any = CrossEntropyLoss(),
        merge: MergeRule | SlowStep = "eq8",
        eval_samples: int = 0,
        plugins: Sequence[BasePlugin] = (),
        **template: Any,
    ) -> None:
        """
        :param merge: the slow step, as for :class:`CoVONPlugin`.
        :param eval_samples: posterior samples that evaluations average over, as for the plugin.
        :param plugins: come after the strategy's own, so that they see the merged weights.
        :param template: arguments of Avalanche's ``SupervisedTemplate`` with its defaults, except
            that ``eval_mb_size`` defaults to ``train_mb_size``.
        """
        template.setdefault("eval_mb_size", template.get("train_mb_size", 1))
        own = CoVONPlugin(merge=merge, eval_samples=eval_samples)
        plugins = [own, *(plugins or ())]
        super().__init__(
            model=model, optimizer=optimizer, criterion=criterion, plugins=plugins, **template
        )

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
            if isinstance(self.optimizer, CoVON):
                self.optimizer.discard_samples()
            raise


class ERACEStrategy(ER_ACE):
    """ER-ACE (Caccia et al., 2022): the cross-entropy of the current batch among its own classes,
    plus that of stored examples. Its arguments are Avalanche's, on whose class it is based.

    As in the authors' code, the two losses are added, and a step has as many stored examples as new
    ones; Avalanche halves the sum and uses 10. Replay starts with the second experience, and the
    memory then also has examples of the current one. From then on classes that are not in the
    current batch are masked, including those that no task has had, and both losses are plain
    cross-entropies: the strategy's criterion, with its class weights or label smoothing, is that of
    the first experience alone.
    """

    replay_loader: Any

    def __init__(self, *, batch_size_mem: int | None = None, **arguments: Any) -> None:
        """
        :param batch_size_mem: stored examples per step, at most all; ``None``: as many as
            ``train_mb_size``.
        """
        size = batch_size_mem or arguments.get("train_mb_size", 1)
        super().__init__(batch_size_mem=size, **arguments)
        self.ace_criterion = _asymmetric_cross_entropy

    def _before_training_exp(self, **kwargs: Any) -> None:
        if DistributedHelper.world_size > 1:
            raise ValueError("ERACEStrategy needs whole batches: train in one process")
        super()._before_training_exp(**kwargs)
        own: Any = self
        # Avalanche goes by the index in the stream, not by what was trained, and does not replay at
        # all from fewer examples than a batch has.
        own.replay_loader = None
        if own.clock.train_exp_counter > 0 and len(buffer := own.storage_policy.buffer):
            size = min(own.batch_size_mem, len(buffer))
            loader = DataLoader(buffer, batch_size=size, shuffle=True, drop_last=True)
            own.replay_loader = cycle(loader)


def _asymmetric_cross_entropy(
    out_in: Tensor, target_in: Tensor, out_buffer: Tensor, target_buffer: Tensor
) -> Tensor:
    """The sum of both losses; new examples are compared among their own classes."""
    present = F.one_hot(target_in, out_in.shape[1]).amax(0)
    current = F.cross_entropy(out_in.masked_fill(present == 0, -torch.inf), target_in)
    return F.cross_entropy(out_buffer, target_buffer) + current


__all__ = ["CoVONStrategy", "ERACEStrategy"]
