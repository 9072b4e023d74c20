"""Avalanche's Synaptic Intelligence and Riemannian Walk as baselines, with fixes for CPUs and for
several processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche.training.plugins import RWalkPlugin, SynapticIntelligencePlugin
from avalanche.training.utils import copy_params_dict

from covon_avalanche.data_loading.data_parallel import batch_share


class AvalancheSIPlugin(
    SynapticIntelligencePlugin,
    supports_distributed=True,  # type: ignore[call-arg]
):
    """Avalanche's Synaptic Intelligence (Zenke et al., 2017; Maltoni and Lomonaco, 2019).

    Avalanche 0.6 stores the old weights as ``param.detach().cpu().flatten()``, which on a CPU
    shares the parameter's memory: no weight ever seems to move, and the penalty stays zero. This
    plugin copies them. Task identities are not used.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Copy the reference weights of the penalty."""
        super().before_training_exp(strategy, **kwargs)
        _copy_values(self.ewc_data[0])

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Copy the weights before the step."""
        super().before_training_iteration(strategy, **kwargs)
        _copy_values(self.syn_data["old_theta"])


def _copy_values(values: Mapping[str, Any]) -> None:
    for value in values.values():
        value.data = value.data.clone()


class AvalancheRWalkPlugin(RWalkPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Avalanche's Riemannian Walk (Chaudhry et al., 2018).

    Avalanche's plugin computes a second gradient before each step. Under
    :class:`covon_avalanche.data_loading.DataParallel` that would be the gradient of one process's
    images; this plugin averages it over all images of the batch. Its arguments are Avalanche's. It
    puts the model into evaluation mode before each step, and leaves it there.
    """

    def _update_grad(self, strategy: Any) -> None:
        super()._update_grad(strategy)
        if not DistributedHelper.is_distributed:
            return
        images, size = batch_share(strategy)
        for p in strategy.model.parameters():
            if p.grad is not None:
                p.grad *= images / size
                dist.all_reduce(p.grad)
        self.iter_grad = copy_params_dict(strategy.model, copy_grad=True)
