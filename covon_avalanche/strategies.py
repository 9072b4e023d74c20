"""Ready-made strategies: Avalanche's ``SupervisedTemplate`` with a plugin of this package, and
Avalanche's ER-ACE, made to work in several processes.

Constructors are keyword-only and follow Avalanche's order: the model (its head may grow), the
optimizer, the criterion (averaged over the batch), the arguments of the strategy's plugin, which
documents them, and those of ``SupervisedTemplate`` with its defaults, except that ``eval_mb_size``
defaults to ``train_mb_size``. ``plugins`` come after the strategy's own plugin, so that they see
the consolidated weights, except for a :class:`MergePlugin`, which comes first. Evaluations inside
``train`` (``eval_every``) come before the merge. Batches are read directly from tensors where the
data allow it, see :class:`TensorBatches`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from avalanche.core import BasePlugin
from avalanche.distributed import DistributedHelper
from avalanche.training import ACECriterion
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.plugins.evaluation import default_evaluator
from avalanche.training.supervised import ER_ACE
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.strategy_mixin_protocol import CriterionType
from avalanche.training.utils import cycle
from torch import Tensor
from torch.nn import CrossEntropyLoss, Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from covon_avalanche.data_loading import TensorBatches
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.plugins import AdaRegPlugin, CoVONPlugin, EWCStarPlugin, MergePlugin, VCLPlugin


class _PluginStrategy(TensorBatches, SupervisedTemplate):
    """A strategy with a plugin of its own, whose arguments the constructor takes, too."""

    plugin_class: ClassVar[type[SupervisedPlugin]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "plugin_class" in vars(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)  # Avalanche's check of the names of arguments

    def __init__(
        self,
        *,
        model: Module,
        optimizer: Optimizer,
        criterion: CriterionType = CrossEntropyLoss(),
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[BasePlugin] | None = None,
        evaluator: EvaluationPlugin | Callable[[], EvaluationPlugin] = default_evaluator,
        eval_every: int = -1,
        peval_mode: Literal["epoch", "iteration"] = "epoch",
        **own: Any,
    ) -> None:
        ordered = [self.plugin_class(**own), *(plugins or ())]
        ordered.sort(key=lambda plugin: not isinstance(plugin, MergePlugin))
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            train_mb_size=train_mb_size,
            train_epochs=train_epochs,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=ordered,
            evaluator=evaluator,
            eval_every=eval_every,
            peval_mode=peval_mode,
        )


def _constructor(cls: type[_PluginStrategy]) -> Callable[..., None]:
    """A copy of the constructor whose signature has the plugin's arguments instead of ``**own``."""
    base: Any = inspect.unwrap(_PluginStrategy.__init__)
    copy: Any = FunctionType(base.__code__, base.__globals__, closure=base.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = base.__kwdefaults__, f"{cls.__qualname__}.__init__"
    *template, _ = inspect.signature(base).parameters.values()
    own = inspect.signature(cls.plugin_class).parameters.values()
    first = [parameter.name for parameter in template].index("criterion") + 1
    copy.__signature__ = inspect.Signature([*template[:first], *own, *template[first:]])
    return copy


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

    plugin_class = CoVONPlugin


class VCLStrategy(_PosteriorStrategy):
    """Mean-field variational continual learning with a ``BayesByBackprop`` optimizer; see
    :class:`VCLPlugin`."""

    plugin_class = VCLPlugin


class AdaRegStrategy(_PluginStrategy):
    """AdamW-Regularized, with an optimizer of the Adam family; see :class:`AdaRegPlugin`."""

    plugin_class = AdaRegPlugin


class EWCStarStrategy(_PluginStrategy):
    """EWC with accumulated Fisher information, one anchor and any optimizer; see
    :class:`EWCStarPlugin`."""

    plugin_class = EWCStarPlugin


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
