"""Synaptic Intelligence that also works where weights are on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.training.plugins import SynapticIntelligencePlugin


class SIPlugin(SynapticIntelligencePlugin):
    """Avalanche's Synaptic Intelligence (Zenke et al., 2017; Maltoni and Lomonaco, 2019).

    Avalanche 0.6 keeps "old" weights as ``param.detach().cpu().flatten()``, which on a CPU is
    the parameter's own memory: no weight ever seems to move, and the penalty stays zero. This
    copies them. Task identities are not used.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Keep the weights the penalty pulls to."""
        super().before_training_exp(strategy, **kwargs)
        _own(self.ewc_data[0])

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Keep the weights before the step."""
        super().before_training_iteration(strategy, **kwargs)
        _own(self.syn_data["old_theta"])


def _own(values: Mapping[str, Any]) -> None:
    for value in values.values():
        value.data = value.data.clone()
