"""The mixin for strategies, and the loader it puts in the place of Avalanche's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from avalanche.distributed import DistributedHelper
from avalanche.training.templates import BaseSGDTemplate
from torch import Tensor

from covon_avalanche.data_loading.fetched import FetchedExamples
from covon_avalanche.data_loading.rows import Rows
from covon_avalanche.data_loading.unwrapping import rows_of


class TensorBatches:
    """Mixin for Avalanche strategies, to be named before the strategy's own class.

    A strategy that makes its loaders in a way of its own (its class has a
    ``make_train_dataloader``, ``make_eval_dataloader`` or
    ``_obtain_common_dataloader_parameters``) keeps them.

    A dataset of your own takes part if it has a method ``tensor_batch(indices)`` that returns its
    columns for an int64 tensor of indices, as ``__getitem__`` would row by row. So does one
    with a method ``raw_batch(indices)``, which returns a list of inputs and a tensor of
    targets, if its transform has a method ``batch(inputs)``, as those of the image streams do.
    A subclass that overrides ``__getitem__`` overrides these, too, or takes no part.

    In training, fetched examples are kept only of datasets and behind transforms that are known
    to be deterministic: the datasets of torchvision, Avalanche and our streams, torch's
    ``TensorDataset``, ``Subset`` and ``ConcatDataset``; of the transforms torchvision's
    (``ToTensor``, ``Normalize``, ``Resize``, ``CenterCrop`` and the like, a ``Compose`` of them)
    and Avalanche's permutation of pixels; and all that have an attribute
    ``deterministic = True``. A dataset says so of all but its attributes ``transform``,
    ``target_transform`` and ``transforms``, which are looked at themselves.

    ``tensor_batches_bytes`` is the most memory that the fetched examples of a strategy may take.
    Workers, where there are any, fetch them.
    """

    tensor_batches_bytes: ClassVar[int] = 2**31

    def make_train_dataloader(
        self,
        num_workers: int = 0,
        shuffle: bool = True,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> None:
        """Avalanche's loader, or one that gives the same batches from tensors."""
        following: Any = super()
        following.make_train_dataloader(
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            **kwargs,
        )
        if _is_avalanches(self, following, "make_train_dataloader"):
            size = self.train_mb_size  # type: ignore[attr-defined]
            self._take_over(size, shuffle, drop_last, num_workers)

    def make_eval_dataloader(
        self,
        num_workers: int = 0,
        shuffle: bool = False,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        **kwargs: Any,
    ) -> None:
        """Avalanche's loader, or one that gives the same batches from tensors."""
        following: Any = super()
        following.make_eval_dataloader(
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            **kwargs,
        )
        if _is_avalanches(self, following, "make_eval_dataloader"):
            size = self.eval_mb_size  # type: ignore[attr-defined]
            self._take_over(size, shuffle, False, num_workers)

    def _take_over(self, batch_size: int, shuffle: bool, drop_last: bool, workers: int) -> None:
        strategy: Any = self
        kept = vars(self).setdefault("_fetched_examples", FetchedExamples())
        kept.limit = self.tensor_batches_bytes
        rows = None
        if not DistributedHelper.is_distributed:
            rows = rows_of(strategy.adapted_dataset, kept, workers=workers)
        if rows is not None:
            strategy.dataloader = TensorLoader(rows, batch_size, shuffle, drop_last)


def _is_avalanches(strategy: Any, following: Any, name: str) -> bool:
    """Whether the classes after the mixin make this loader as Avalanche's template does."""
    found = getattr(following, name), strategy._obtain_common_dataloader_parameters
    own = (
        getattr(BaseSGDTemplate, name),
        BaseSGDTemplate._obtain_common_dataloader_parameters,
    )
    return tuple(getattr(method, "__func__", None) for method in found) == own


class TensorLoader:
    """Batches of rows, drawing the order as torch's ``DataLoader`` would."""

    def __init__(self, rows: Rows, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Tensor]]:
        _draw_seed()  # a DataLoader draws one for its workers first
        order = torch.arange(len(self.rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(_draw_seed())
            order = torch.randperm(len(self.rows), generator=generator)
        for indices in order.split(self.batch_size)[: len(self)]:
            yield list(self.rows.tensor_batch(indices))


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())
