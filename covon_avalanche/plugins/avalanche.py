"""Avalanche's Synaptic Intelligence as a baseline, with a fix for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.training.plugins import SynapticIntelligencePlugin


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
