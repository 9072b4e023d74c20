"""Dark Experience Replay in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.distributed import DistributedHelper
from avalanche.models import IncrementalClassifier, MultiHeadClassifier, avalanche_forward
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.plugins.task_loader import task_autocast


class DERPlugin(SupervisedPlugin):
    """Dark Experience Replay, DER++ with ``beta > 0``; **uses replay**.

    After the loss of the current batch it adds ``alpha`` times the mean squared difference between
    the logits of stored inputs and those stored with them, and ``beta`` times the loss of other
    stored examples, in a forward pass each. Reservoir sampling adds the examples of every batch to
    the memory as used in training: the transformed inputs, with the logits of that step before its
    update. Buzzega et al., "Dark Experience for General Continual Learning" (NeurIPS 2020); written
    from the paper and the formulas of the authors' code (github.com/aimagelab/mammoth), which
    stores inputs without their random transform, and transforms them anew. Avalanche's
    implementation computes logits after each task, on other inputs than those trained on, and
    trains on stored and current examples in one forward pass. Stored logits of classes that are new
    count as 0, and so do logits that Avalanche's classifiers mask. Task identities are used for
    multi-head models only.
    """

    def __init__(
        self,
        mem_size: int = 200,
        batch_size_mem: int | None = None,
        alpha: float = 0.1,
        beta: float = 0.5,
    ) -> None:
        """
        :param mem_size: examples in the memory.
        :param batch_size_mem: stored examples per step; ``None``: as many as ``train_mb_size``.
        :param alpha: weight of the difference of logits.
        :param beta: weight of the loss of stored examples; 0 is DER.
        """
        super().__init__()
        check_whole("mem_size", mem_size)
        if batch_size_mem is not None:
            check_whole("batch_size_mem", batch_size_mem)
        check_positive("alpha", alpha, zero=True)
        check_positive("beta", beta, zero=True)
        self.mem_size = mem_size
        self.batch_size_mem = batch_size_mem
        self.alpha = alpha
        self.beta = beta
        self.seen = 0
        """Number of examples that training has seen."""
        self.memory: list[Tensor] = []
        """Inputs, labels, task labels and logits, of ``mem_size`` rows; empty before the first
        batch."""
        self._batches: dict[int, list[Tensor]] = {}  # of this step, by iteration

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Drop an interrupted step.

        :raises ValueError: in several processes, each of which would have a memory of its own.
        """
        self._batches.clear()
        if DistributedHelper.world_size > 1:
            raise ValueError("DERPlugin needs whole batches: train in one process")

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add the losses of stored examples, if there are any."""
        logits = _unmasked(strategy.model, strategy.mb_output.detach())
        x, y = strategy.mb_x, strategy.mb_y
        if hasattr(strategy.experience, "task_labels"):
            task = strategy.mb_task_id
        else:  # as in benchmarks of plain data sets
            task = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        batch = [x, y, task, logits]
        self._batches[strategy.clock.train_iterations] = batch
        if self.seen == 0:
            return
        size = self.batch_size_mem or strategy.train_mb_size
        if self.alpha > 0:
            x, _, task, logits = self._drawn(size)
            outputs = self._outputs(strategy, x, task)[:, : logits.shape[1]]
            outputs = _unmasked(strategy.model, outputs)
            strategy.loss += self.alpha * nn.functional.mse_loss(outputs, logits)
        if self.beta > 0:
            x, y, task, _ = self._drawn(size)
            strategy.loss += self.beta * strategy._criterion(self._outputs(strategy, x, task), y)

    def _outputs(self, strategy: Any, x: Tensor, task: Tensor) -> Tensor:
        with task_autocast(strategy):
            outputs: Tensor = avalanche_forward(strategy.model, x, task)
        return outputs.to(strategy.mb_output.dtype)

    def _drawn(self, size: int) -> list[Tensor]:
        """Stored examples, without replacement."""
        rows = torch.randperm(min(self.seen, self.mem_size), device="cpu")[:size]
        return [column[rows.to(column.device)] for column in self.memory]

    @torch.no_grad()
    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Reservoir sampling: every example seen is in the memory with the same probability."""
        for batch in self._batches.values():
            self._store(batch)
        self._batches.clear()

    def _store(self, batch: list[Tensor]) -> None:
        if not self.memory:
            self.memory = [column.new_zeros(self.mem_size, *column.shape[1:]) for column in batch]
        missing = batch[3].shape[1] - self.memory[3].shape[1]
        if missing:  # the classifier has grown
            self.memory[3] = nn.functional.pad(self.memory[3], (0, missing))
        for i in range(len(batch[0])):
            row = self.seen
            if row >= self.mem_size:
                row = int(torch.randint(row + 1, (), device="cpu"))
            self.seen += 1
            if row < self.mem_size:
                for column, values in zip(self.memory, batch, strict=True):
                    column[row] = values[i]


def _unmasked(model: nn.Module, logits: Tensor) -> Tensor:
    """Logits with 0 in place of the values of masked units, which are far from any other."""
    for module in model.modules():
        if isinstance(module, IncrementalClassifier | MultiHeadClassifier) and module.masking:
            logits = logits.masked_fill(logits == module.mask_value, 0.0)
    return logits
