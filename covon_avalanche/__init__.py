"""Bayesian, exemplar-free continual learning for Avalanche.

Names are loaded on first use, so that ``covon_avalanche.optim`` does not import Avalanche.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covon_avalanche.data_loading import TensorBatches
    from covon_avalanche.optim import BayesByBackprop, CoVON
    from covon_avalanche.plugins import (
        AdaRegPlugin,
        CoVONPlugin,
        EVCLPlugin,
        EWCStarPlugin,
        ICaRLPlugin,
        MergePlugin,
        SIPlugin,
        TDVCLPlugin,
        VCLPlugin,
    )
    from covon_avalanche.posterior import DiagGaussian
    from covon_avalanche.report.results import accuracy_matrix, load_results
    from covon_avalanche.strategies import (
        AdaRegStrategy,
        CoVONStrategy,
        EWCStarStrategy,
        VCLStrategy,
    )

__version__ = "0.2.0.dev0"

_HOME = {
    "DiagGaussian": "posterior",
    "BayesByBackprop": "optim",
    "CoVON": "optim",
    "AdaRegPlugin": "plugins",
    "CoVONPlugin": "plugins",
    "EVCLPlugin": "plugins",
    "EWCStarPlugin": "plugins",
    "ICaRLPlugin": "plugins",
    "MergePlugin": "plugins",
    "SIPlugin": "plugins",
    "TDVCLPlugin": "plugins",
    "VCLPlugin": "plugins",
    "AdaRegStrategy": "strategies",
    "CoVONStrategy": "strategies",
    "EWCStarStrategy": "strategies",
    "VCLStrategy": "strategies",
    "TensorBatches": "data_loading",
    "accuracy_matrix": "report.results",
    "load_results": "report.results",
}

__all__ = [
    "AdaRegPlugin",
    "AdaRegStrategy",
    "BayesByBackprop",
    "CoVON",
    "CoVONPlugin",
    "CoVONStrategy",
    "DiagGaussian",
    "EVCLPlugin",
    "EWCStarPlugin",
    "EWCStarStrategy",
    "ICaRLPlugin",
    "MergePlugin",
    "SIPlugin",
    "TDVCLPlugin",
    "TensorBatches",
    "VCLPlugin",
    "VCLStrategy",
    "accuracy_matrix",
    "load_results",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
