"""Merge rules: how the weights of a new task are merged with those of the earlier tasks.

Every rule works with any optimizer, through :func:`merge_into`. :class:`DUCT` and :class:`SLCA`
keep a classifier per domain; :func:`align_classifier` retrains a shared one. Nothing here imports
Avalanche.
"""

from covon_avalanche.merging.alignment import align_classifier
from covon_avalanche.merging.averaging import EMA, Average
from covon_avalanche.merging.batch_norm import update_batch_norm
from covon_avalanche.merging.duct import DUCT
from covon_avalanche.merging.fisher import CoFiMA, FisherMerge
from covon_avalanche.merging.kfac import KFACMerge
from covon_avalanche.merging.magmax import MagMax
from covon_avalanche.merging.regmean import RegMean
from covon_avalanche.merging.rule import MergeRule, Task, merge_into
from covon_avalanche.merging.slca import SLCA

__all__ = [
    "DUCT",
    "EMA",
    "SLCA",
    "Average",
    "CoFiMA",
    "FisherMerge",
    "KFACMerge",
    "MagMax",
    "MergeRule",
    "RegMean",
    "Task",
    "align_classifier",
    "merge_into",
    "update_batch_norm",
]
