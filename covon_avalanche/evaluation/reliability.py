"""A bin of a reliability diagram; this module does not import torch."""

from __future__ import annotations

from typing import NamedTuple


class ReliabilityBin(NamedTuple):
    """Predictions of similar confidence, and their means; 0 if there are none."""

    images: int
    confidence: float
    accuracy: float
