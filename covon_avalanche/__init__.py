"""Bayesian, exemplar-free continual learning for Avalanche.

Names are loaded on first use, so that ``covon_avalanche.optim`` does not import Avalanche.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covon_avalanche.data_loading import TensorBatches as TensorBatches
    from covon_avalanche.experiment.bundle import load_bundle as load_bundle
    from covon_avalanche.experiment.bundle import save_bundle as save_bundle
    from covon_avalanche.optim import BayesByBackprop as BayesByBackprop
    from covon_avalanche.optim import CoVON as CoVON
    from covon_avalanche.plugins import AdaRegPlugin as AdaRegPlugin
    from covon_avalanche.plugins import CoVONPlugin as CoVONPlugin
    from covon_avalanche.plugins import EVCLPlugin as EVCLPlugin
    from covon_avalanche.plugins import EWCPlugin as EWCPlugin
    from covon_avalanche.plugins import EWCStarPlugin as EWCStarPlugin
    from covon_avalanche.plugins import ICaRLPlugin as ICaRLPlugin
    from covon_avalanche.plugins import LwFPlugin as LwFPlugin
    from covon_avalanche.plugins import MASPlugin as MASPlugin
    from covon_avalanche.plugins import MergePlugin as MergePlugin
    from covon_avalanche.plugins import RWalkPlugin as RWalkPlugin
    from covon_avalanche.plugins import SIPlugin as SIPlugin
    from covon_avalanche.plugins import TDVCLPlugin as TDVCLPlugin
    from covon_avalanche.plugins import VCLPlugin as VCLPlugin
    from covon_avalanche.posterior import DiagGaussian as DiagGaussian
    from covon_avalanche.report import accuracy_matrix as accuracy_matrix
    from covon_avalanche.report import load_results as load_results
    from covon_avalanche.strategies import CoVONStrategy as CoVONStrategy

__version__ = "0.2.0.dev0"

_NAMES = {
    "posterior": ["DiagGaussian"],
    "optim": ["BayesByBackprop", "CoVON"],
    "plugins": [
        *("AdaRegPlugin", "CoVONPlugin", "EVCLPlugin", "EWCPlugin", "EWCStarPlugin"),
        *("ICaRLPlugin", "LwFPlugin", "MASPlugin", "MergePlugin", "RWalkPlugin", "SIPlugin"),
        *("TDVCLPlugin", "VCLPlugin"),
    ],
    "strategies": ["CoVONStrategy"],
    "data_loading": ["TensorBatches"],
    "report": ["accuracy_matrix", "load_results"],
    "experiment.bundle": ["load_bundle", "save_bundle"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

_PACKAGES = (
    *("backbones", "closed_form", "data_loading", "datasets", "evaluation", "experiment"),
    *("integrations", "merging", "optim", "plugins", "posterior", "prompting", "report"),
    *("strategies", "streams"),
)

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_PACKAGES, "__version__"])
