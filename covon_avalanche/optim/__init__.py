"""Torch optimizers that hold a diagonal Gaussian posterior over the weights.

This room never imports Avalanche: torch, safetensors, numpy and, if installed, numba.
"""

from covon_avalanche.optim.bayes_by_backprop import BayesByBackprop
from covon_avalanche.optim.covon import CoVON
from covon_avalanche.optim.posterior_optimizer import PosteriorOptimizer

__all__ = ["BayesByBackprop", "CoVON", "PosteriorOptimizer"]
