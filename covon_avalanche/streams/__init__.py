"""Domain-incremental benchmarks: one training experience per domain, task label 0."""

from covon_avalanche.streams.permuted import PermutedDigits, PermutedMNIST

__all__ = ["PermutedDigits", "PermutedMNIST"]
