"""Batches by index from tensors, instead of example by example, for Avalanche strategies.

``class FastNaive(TensorBatches, Naive)`` trains as ``Naive`` does, on the same batches in the
same order. Where an experience's data are tensors behind Avalanche's wrappers, a batch is one
``index_select``; where they are something else with deterministic transforms (images on
disk), the examples are fetched once and kept as tensors (see :mod:`.deterministic`). Where they
are too large for that, but the transform takes many images at once and no workers are asked
for, a batch is made at once. Where none of this holds, because transforms are random or several
tasks are balanced, Avalanche's own loader stays.
"""

from covon_avalanche.data_loading.fetched import FetchedExamples
from covon_avalanche.data_loading.loading import TensorBatches, TensorLoader
from covon_avalanche.data_loading.rows import Columns, Rows
from covon_avalanche.data_loading.unwrapping import rows_of

__all__ = ["Columns", "FetchedExamples", "Rows", "TensorBatches", "TensorLoader", "rows_of"]
