"""Avalanche plugins: they say when; ``covon_avalanche.optim`` and ``gaussian`` say what."""

from covon_avalanche.plugins.ada_reg import AdaRegPlugin
from covon_avalanche.plugins.covon import CoVONPlugin
from covon_avalanche.plugins.ewc_star import EWCStarPlugin
from covon_avalanche.plugins.plateau import LossPlateau
from covon_avalanche.plugins.vcl import VCLPlugin

__all__ = ["AdaRegPlugin", "CoVONPlugin", "EWCStarPlugin", "LossPlateau", "VCLPlugin"]
