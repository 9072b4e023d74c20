"""A mixin for Avalanche strategies, and the loader with which it replaces Avalanche's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from avalanche.distributed import DistributedHelper
from avalanche.training.templates import BaseSGDTemplate

from covon_avalanche.data_loading.unwrapping import Rows, rows_of


class TensorBatches:
    """Mixin for Avalanche strategies, listed before the strategy class.

    A strategy class that overrides ``make_train_dataloader``, ``make_eval_dataloader`` or
    ``_obtain_common_dataloader_parameters`` keeps its own loaders.

    Your own data set is read by batches if it has a method ``tensor_batch(indices)``, which
    returns its columns at an int64 tensor of indices, equal to ``__getitem__`` row by row. A
    subclass that overrides only ``__getitem__`` is not.

    Data behind transforms stay with Avalanche's loader, because transforms may be random.
    """

    def make_train_dataloader(
        self, *, shuffle: bool = True, drop_last: bool = False, **kwargs: Any
    ) -> None:
        """Avalanche's loader, or a faster one with the same batches."""
        following: Any = super()
        following.make_train_dataloader(shuffle=shuffle, drop_last=drop_last, **kwargs)
        kept = kwargs.get("persistent_workers")  # which draw one seed for all epochs
        if not kept and _is_not_overridden(self, following, "make_train_dataloader"):
            size = self.train_mb_size  # type: ignore[attr-defined]
            self._replace_loader(size, shuffle, drop_last)

    def make_eval_dataloader(self, *, shuffle: bool = False, **kwargs: Any) -> None:
        """Avalanche's loader, or a faster one with the same batches."""
        following: Any = super()
        following.make_eval_dataloader(shuffle=shuffle, **kwargs)
        if _is_not_overridden(self, following, "make_eval_dataloader"):
            self._replace_loader(self.eval_mb_size, shuffle)  # type: ignore[attr-defined]

    def _replace_loader(self, batch_size: int, shuffle: bool, drop_last: bool = False) -> None:
        strategy: Any = self
        if not DistributedHelper.is_distributed:
            data = strategy.adapted_dataset
            rows = rows_of(data)
            if rows is not None:
                strategy.dataloader = TensorLoader(rows, data, batch_size, shuffle, drop_last)


def _is_not_overridden(strategy: Any, following: Any, name: str) -> bool:
    """Whether the classes after the mixin build this loader as Avalanche's template does."""
    found = getattr(following, name), strategy._obtain_common_dataloader_parameters
    template = (
        getattr(BaseSGDTemplate, name),
        BaseSGDTemplate._obtain_common_dataloader_parameters,
    )
    return tuple(getattr(method, "__func__", None) for method in found) == template


class TensorLoader:
    """Batches of rows, shuffled as torch's ``DataLoader`` does with the same global seed.

    :param rows: result of :func:`rows_of`.
    """

    def __init__(
        self, rows: Rows, dataset: Any, batch_size: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.rows, self.dataset, self.batch_size = rows, dataset, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        n = len(self.dataset)
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_()  # of DataLoader's workers
        order = torch.arange(n, device="cpu")
        if self.shuffle:
            generator = torch.Generator().manual_seed(int(seed.random_()))
            order = torch.randperm(n, generator=generator, device="cpu")
        for indices in order.split(self.batch_size)[: len(self)]:
            yield list(self.rows(indices))
