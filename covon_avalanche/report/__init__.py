"""Results as a DataFrame; reports with tables and figures. Nothing here imports torch."""

from covon_avalanche.report.page import write_archive, write_report
from covon_avalanche.report.results import accuracy_matrix, load_results, results_frame
from covon_avalanche.report.summary import Comparison, comparisons, strategy_summary

__all__ = [
    "Comparison",
    "accuracy_matrix",
    "comparisons",
    "load_results",
    "results_frame",
    "strategy_summary",
    "write_archive",
    "write_report",
]
