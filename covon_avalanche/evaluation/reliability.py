"""Predictions by their confidence. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple


class ReliabilityBin(NamedTuple):
    """Predictions of similar confidence; the means of an empty bin are 0."""

    images: int
    confidence: float
    accuracy: float
