"""Torch optimizers that hold a diagonal Gaussian posterior over the weights, and UPGD.

Imports torch, safetensors, numpy and, if installed, numba; never Avalanche.
"""

from covon_avalanche.optim.bayes_by_backprop import BayesByBackprop
from covon_avalanche.optim.covon import CoVON
from covon_avalanche.optim.posterior_optimizer import PosteriorOptimizer
from covon_avalanche.optim.upgd import UPGD
from covon_avalanche.presets import ALGORITHM_1, PERCEPTRON

__all__ = [
    "ALGORITHM_1",
    "PERCEPTRON",
    "UPGD",
    "BayesByBackprop",
    "CoVON",
    "PosteriorOptimizer",
]
