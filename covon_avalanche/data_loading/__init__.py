"""Batches by index from tensors, instead of example by example, for Avalanche strategies.

``class FastNaive(TensorBatches, Naive)`` trains as ``Naive`` does, on the same batches in the
same order. If an experience's data are tensors behind Avalanche's wrappers, a batch is one
``index_select``. Otherwise, for instance with transforms, Avalanche's own loader is used.
"""

from covon_avalanche.data_loading.loading import TensorBatches, TensorLoader
from covon_avalanche.data_loading.unwrapping import rows_of

__all__ = ["TensorBatches", "TensorLoader", "rows_of"]
