"""Running statistics of batch norm, re-estimated after a merge has changed the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covon_avalanche.posterior.fisher import checked, in_mode


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers of batch norm that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def update_batch_norm(model: nn.Module, batches: Iterable[Sequence[Tensor]]) -> None:
    """Re-estimate the running statistics at the present weights.

    They become the plain average over the batches, as in ``torch.optim.swa_utils.update_bn``,
    but dropout is off, and layers that receive no batch, stay in eval mode, or are in eval mode
    while the model, without its wrappers, is in training mode, keep their statistics, as all layers
    do if the pass is interrupted. Without batch norm there is no pass.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``; shuffled, because
        variances are computed within a batch.
    :raises ValueError: for batches in another format, or without examples.
    """
    with in_mode(model, train=True):
        norms = [norm for norm in batch_norms(model) if norm.training]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    before = [copy.deepcopy(norm.state_dict()) for norm in norms]
    complete = False
    with in_mode(model, train=False), torch.no_grad():
        try:
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # torch's setting for a plain average
            for x, _, *more in checked(batches):
                model(x, *more)
            complete = True
        finally:
            for norm, momentum, state in zip(norms, momenta, before, strict=True):
                norm.momentum = momentum
                if not (complete and norm.num_batches_tracked):
                    norm.load_state_dict(state)
