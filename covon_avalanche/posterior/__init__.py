"""Diagonal Gaussian posteriors over named parameters, and the diagonal Fisher information.

Imports torch and safetensors only, never Avalanche.
"""

from covon_avalanche.posterior.gaussian import DiagGaussian, kl, merge, pool

__all__ = ["DiagGaussian", "kl", "merge", "pool"]
