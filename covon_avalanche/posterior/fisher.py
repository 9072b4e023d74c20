"""Diagonal Fisher information of a classifier, from squared gradients.

Both functions use the data's labels (the empirical Fisher, Eq. 9 of the paper) and return one
tensor per parameter that requires a gradient, in loss²/weight² per example. A batch is
``(input, target, *more)``; the model is called as ``model(input, *more)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.posterior.example_gradients import (
    Batch,
    Criterion,
    Sums,
    add_squared_example_gradients,
    add_squared_gradients,
)


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[Batch], criterion: Criterion = F.cross_entropy
) -> dict[str, Tensor]:
    """Squared gradients of mini-batch means, times the batch size (paper, Algorithm 3).

    ``sum_b B_b² g_b² / N`` with ``g_b`` the gradient of the mean loss of batch ``b`` of
    ``B_b`` out of ``N`` examples; for equal batches ``B`` times the average of ``g_b²``. It
    equals the per-example Fisher for ``B = 1``, and on average where gradients have mean 0.

    :param criterion: loss, averaged over the batch.
    :raises ValueError: if there are no examples.
    """
    return _average(add_squared_gradients, model, batches, criterion)


def squared_example_gradients(
    model: nn.Module, batches: Iterable[Batch], criterion: Criterion = F.cross_entropy
) -> dict[str, Tensor]:
    """Squared per-example gradients, averaged over the examples: the exact empirical Fisher.

    Computed from inputs and output gradients in one backward pass a batch where all parameters
    belong to ``Linear`` and ``Conv2d`` layers, each called once in a forward pass with one row
    per example; otherwise by ``torch.func``, or example by example where control flow depends on
    the data.

    :param criterion: loss, averaged over the batch; one example's must not depend on others.
    :raises ValueError: if there are no examples.
    """
    return _average(add_squared_example_gradients, model, batches, criterion)


def _average(
    add: Callable[[nn.Module, Sums, Batch, Criterion], None],
    model: nn.Module,
    batches: Iterable[Batch],
    criterion: Criterion,
) -> Sums:
    """The average over examples of what ``add`` adds to the sums for each batch, in eval mode."""
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    examples = 0
    with in_mode(model, train=False):
        for batch in batches:
            add(model, sums, batch, criterion)
            examples += len(batch[1])
    if examples == 0:
        raise ValueError("the Fisher needs at least one example, got none")
    return {name: value / examples for name, value in sums.items()}


@contextmanager
def in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Eval or train mode inside, with gradients; each module's own flag is restored outside."""
    flags = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()  # nested tensors, which hooks do not expect
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.train(train)
        with torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in flags.items():
            module.training = flag
