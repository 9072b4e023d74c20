"""Avalanche plugins. They call ``optim``, ``merging`` and ``posterior`` at the right callbacks."""

from covon_avalanche.plugins.ada_reg import AdaRegPlugin
from covon_avalanche.plugins.avalanche import AvalancheSIPlugin
from covon_avalanche.plugins.classifier_alignment import ClassifierAlignmentPlugin
from covon_avalanche.plugins.closed_form import ClosedFormPlugin
from covon_avalanche.plugins.covon import CoVONPlugin
from covon_avalanche.plugins.der import DERPlugin
from covon_avalanche.plugins.duct import DUCTPlugin
from covon_avalanche.plugins.evcl import EVCLPlugin
from covon_avalanche.plugins.ewc import EWCPlugin
from covon_avalanche.plugins.ewc_star import EWCStarPlugin
from covon_avalanche.plugins.icarl import ICaRLPlugin
from covon_avalanche.plugins.lwf import LwFPlugin
from covon_avalanche.plugins.mas import MASPlugin
from covon_avalanche.plugins.merge import MergePlugin
from covon_avalanche.plugins.posterior import VCLPlugin
from covon_avalanche.plugins.prompting import PromptPlugin
from covon_avalanche.plugins.rwalk import RWalkPlugin
from covon_avalanche.plugins.schedule import SchedulePlugin
from covon_avalanche.plugins.si import SIPlugin
from covon_avalanche.plugins.slca import SLCAPlugin
from covon_avalanche.plugins.td_vcl import TDVCLPlugin

__all__ = [
    "AdaRegPlugin",
    "AvalancheSIPlugin",
    "ClassifierAlignmentPlugin",
    "ClosedFormPlugin",
    "CoVONPlugin",
    "DERPlugin",
    "DUCTPlugin",
    "EVCLPlugin",
    "EWCPlugin",
    "EWCStarPlugin",
    "ICaRLPlugin",
    "LwFPlugin",
    "MASPlugin",
    "MergePlugin",
    "PromptPlugin",
    "RWalkPlugin",
    "SIPlugin",
    "SLCAPlugin",
    "SchedulePlugin",
    "TDVCLPlugin",
    "VCLPlugin",
]
