"""Classifiers in closed form on the features of a frozen network: nothing is trained by gradients.

A domain adds sums over its examples, from which the classifier over all domains is computed, so
these methods keep no examples and forget nothing. Imports torch, never Avalanche.
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
