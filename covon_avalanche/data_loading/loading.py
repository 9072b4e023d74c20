"""A mixin for Avalanche strategies, and the loader with which it replaces Avalanche's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from avalanche.distributed import DistributedHelper
from avalanche.training.templates import BaseSGDTemplate
from torch import Tensor

from covon_avalanche.data_loading.example_cache import ExampleCache
from covon_avalanche.data_loading.rows import Rows
from covon_avalanche.data_loading.unwrapping import rows_of


class TensorBatches:
    """Mixin for Avalanche strategies, listed before the strategy class.

    A strategy class that overrides ``make_train_dataloader``, ``make_eval_dataloader`` or
    ``_obtain_common_dataloader_parameters`` keeps its own loaders.

    Your own data set is read by batches if it has a method ``tensor_batch(indices)``, which
    returns its columns at an int64 tensor of indices, equal to ``__getitem__`` row by row. A
    subclass that overrides only ``__getitem__`` is not.

    In training, data behind transforms stay with Avalanche's loader, because transforms may be
    random. In evaluation they are fetched once, by workers if there are any, and cached:
    ``tensor_batches_bytes`` limits the memory.
    """

    tensor_batches_bytes: ClassVar[int] = 2**31

    def make_train_dataloader(
        self, *, num_workers: int = 0, shuffle: bool = True, drop_last: bool = False, **kwargs: Any
    ) -> None:
        """Avalanche's loader, or a faster one with the same batches."""
        following: Any = super()
        following.make_train_dataloader(
            num_workers=num_workers, shuffle=shuffle, drop_last=drop_last, **kwargs
        )
        if _is_not_overridden(self, following, "make_train_dataloader"):
            size = self.train_mb_size  # type: ignore[attr-defined]
            self._replace_loader(size, shuffle, drop_last, num_workers)

    def make_eval_dataloader(
        self, *, num_workers: int = 0, shuffle: bool = False, **kwargs: Any
    ) -> None:
        """Avalanche's loader, or a faster one with the same batches."""
        following: Any = super()
        following.make_eval_dataloader(num_workers=num_workers, shuffle=shuffle, **kwargs)
        if _is_not_overridden(self, following, "make_eval_dataloader"):
            size = self.eval_mb_size  # type: ignore[attr-defined]
            self._replace_loader(size, shuffle, False, num_workers)

    def _replace_loader(
        self, batch_size: int, shuffle: bool, drop_last: bool, workers: int
    ) -> None:
        if DistributedHelper.is_distributed:
            return
        strategy: Any = self
        cache = vars(self).setdefault("_example_cache", ExampleCache())
        cache.limit = self.tensor_batches_bytes
        rows = rows_of(strategy.adapted_dataset, cache, workers=workers)
        if rows is not None:
            strategy.dataloader = TensorLoader(rows, batch_size, shuffle, drop_last)


def _is_not_overridden(strategy: Any, following: Any, name: str) -> bool:
    """Whether the classes after the mixin build this loader as Avalanche's template does."""
    found = getattr(following, name), strategy._obtain_common_dataloader_parameters
    template = (
        getattr(BaseSGDTemplate, name),
        BaseSGDTemplate._obtain_common_dataloader_parameters,
    )
    return tuple(getattr(method, "__func__", None) for method in found) == template


class TensorLoader:
    """Batches of rows, shuffled as torch's ``DataLoader`` does with the same global seed."""

    def __init__(self, rows: Rows, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Tensor]]:
        _draw_seed()  # a DataLoader first draws one for its workers
        order = torch.arange(len(self.rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(_draw_seed())
            order = torch.randperm(len(self.rows), generator=generator)
        for indices in order.split(self.batch_size)[: len(self)]:
            yield list(self.rows.tensor_batch(indices))


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())
