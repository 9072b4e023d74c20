"""Avalanche plugins: they say when; ``covon_avalanche.optim`` and ``gaussian`` say what."""

from covon_avalanche.plugins.ada_reg import AdaRegPlugin
from covon_avalanche.plugins.covon import CoVONPlugin
from covon_avalanche.plugins.evcl import EVCLPlugin
from covon_avalanche.plugins.ewc_star import EWCStarPlugin
from covon_avalanche.plugins.icarl import ICaRLPlugin
from covon_avalanche.plugins.plateau import LossPlateau
from covon_avalanche.plugins.si import SIPlugin
from covon_avalanche.plugins.td_vcl import TDVCLPlugin
from covon_avalanche.plugins.vcl import VCLPlugin

__all__ = [
    "AdaRegPlugin",
    "CoVONPlugin",
    "EVCLPlugin",
    "EWCStarPlugin",
    "ICaRLPlugin",
    "LossPlateau",
    "SIPlugin",
    "TDVCLPlugin",
    "VCLPlugin",
]
