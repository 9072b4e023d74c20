"""Batches by index from tensors, instead of example by example, for Avalanche strategies.

``class FastNaive(TensorBatches, Naive)`` trains as ``Naive`` does, on the same batches in the
same order. If an experience's data are tensors behind Avalanche's wrappers, a batch is one
``index_select``. In evaluation other examples, such as images on disk, are fetched once and cached
as tensors. Otherwise, for instance in training with transforms, Avalanche's own loader is used.
"""

from covon_avalanche.data_loading.example_cache import ExampleCache
from covon_avalanche.data_loading.loading import TensorBatches, TensorLoader
from covon_avalanche.data_loading.rows import Columns, Rows
from covon_avalanche.data_loading.unwrapping import rows_of

__all__ = ["Columns", "ExampleCache", "Rows", "TensorBatches", "TensorLoader", "rows_of"]
