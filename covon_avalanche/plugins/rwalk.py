"""Riemannian Walk that also works in several processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche.training.plugins import RWalkPlugin as AvalancheRWalk
from avalanche.training.utils import copy_params_dict


class RWalkPlugin(AvalancheRWalk, supports_distributed=True):  # type: ignore[call-arg]
    """Avalanche's Riemannian Walk (Chaudhry et al., 2018).

    Avalanche's plugin computes a second gradient before each step. Under
    :class:`covon_avalanche.data_loading.DataParallel` that would be the gradient of one process's
    images; this plugin averages it over all images of the batch. Its arguments are Avalanche's.
    """

    def _update_grad(self, strategy: Any) -> None:
        super()._update_grad(strategy)
        share = getattr(strategy, "batch_share", None)
        if share is None or not DistributedHelper.is_distributed:
            return
        for p in strategy.model.parameters():
            if p.grad is not None:
                p.grad *= share[0] / share[1]
                dist.all_reduce(p.grad)
        self.iter_grad = copy_params_dict(strategy.model, copy_grad=True)
