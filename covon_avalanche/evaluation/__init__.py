"""What is measured: accuracy matrix, average accuracy, backward transfer, memory."""

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix, mean_and_std

__all__ = ["AccuracyMatrix", "mean_and_std"]
