"""Metrics: accuracy matrix, average accuracy, backward transfer, calibration, memory.

Names are loaded on first use, so that results can be read without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix

if TYPE_CHECKING:
    from covon_avalanche.evaluation.calibration import Calibration, CalibrationSums
    from covon_avalanche.evaluation.domain_metrics import DomainMetrics
    from covon_avalanche.evaluation.memory import MemoryFootprint

_HOME = {
    "Calibration": "calibration",
    "CalibrationSums": "calibration",
    "DomainMetrics": "domain_metrics",
    "MemoryFootprint": "memory",
}

__all__ = ["AccuracyMatrix", "Calibration", "CalibrationSums", "DomainMetrics", "MemoryFootprint"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
