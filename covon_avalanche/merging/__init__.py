"""Merge rules: how the weights of a new task are merged with those of the earlier tasks.

Every rule works with any optimizer, through :func:`merge_into`. :class:`DUCT` and :class:`SLCA`
keep a classifier per domain; :func:`align_classifier` retrains a shared one; :class:`InputAnchor`
uses RegMean's second moments during training. Nothing here imports Avalanche.
"""

from covon_avalanche.merging.alignment import align_classifier
from covon_avalanche.merging.averaging import EMA, Average
from covon_avalanche.merging.batch_norm import update_batch_norm
from covon_avalanche.merging.duct import DUCT
from covon_avalanche.merging.fisher import CoFiMA, FisherMerge
from covon_avalanche.merging.input_anchor import InputAnchor
from covon_avalanche.merging.kfac import KFACMerge
from covon_avalanche.merging.regmean import RegMean
from covon_avalanche.merging.rule import Eq8, MergeRule, Task, merge_into
from covon_avalanche.merging.slca import SLCA
from covon_avalanche.merging.task_vectors import TIES, MagMax, TaskArithmetic

__all__ = [
    "DUCT",
    "EMA",
    "SLCA",
    "TIES",
    "Average",
    "CoFiMA",
    "Eq8",
    "FisherMerge",
    "InputAnchor",
    "KFACMerge",
    "MagMax",
    "MergeRule",
    "RegMean",
    "Task",
    "TaskArithmetic",
    "align_classifier",
    "merge_into",
    "update_batch_norm",
]
