"""Classifiers in closed form on features of a frozen network, without training by gradients.

Each domain contributes sums over its examples, and the classifier over all domains is computed
from these sums, as from all examples together, although none is kept. This package imports torch,
but not Avalanche.
"""

from covon_avalanche.closed_form.features import FeatureExtractor, blocks_of
from covon_avalanche.closed_form.model import ClosedFormHead, ClosedFormModel
from covon_avalanche.closed_form.ncm import NearestClassMean
from covon_avalanche.closed_form.ranpac import RidgeClassifier

__all__ = [
    "ClosedFormHead",
    "ClosedFormModel",
    "FeatureExtractor",
    "NearestClassMean",
    "RidgeClassifier",
    "blocks_of",
]
