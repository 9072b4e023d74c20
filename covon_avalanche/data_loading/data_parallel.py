"""Data-parallel training in an Avalanche strategy: each process computes a share of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from avalanche.benchmarks.utils.data_loader import MultiDatasetDataLoader
from avalanche.distributed import DistributedHelper
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from covon_avalanche.data_loading.loading import TensorLoader
from covon_avalanche.data_loading.unwrapping import rows_of


class DataParallel:
    """Mixin for Avalanche strategies: several processes train as one does with the same
    ``train_mb_size``, which is that of all processes together.

    Gradients are averaged by ``DistributedDataParallel``, which only training's forward passes go
    through: ``strategy.model`` stays the plain model, so that checkpoints do not depend on the
    number of processes. Loaders of plugins, such as those that mix in a memory, load each batch as
    a whole in every process, which then takes its share. Strategies with a training loop of their
    own must use ``forward`` and ``backward`` as Avalanche's templates do.
    """

    supports_distributed = True
    parallel_model: DistributedDataParallel | None = None
    shares: SharesOf | None = None
    """The loader of the experience, if a plugin made it."""

    def _check_distributed_training_compatibility(self) -> bool:
        return True  # Avalanche would warn of plugins that do not work with its own samplers

    def make_train_dataloader(
        self, *, num_workers: int = 0, shuffle: bool = True, drop_last: bool = False, **kwargs: Any
    ) -> None:
        """This process's share of the batches that one process would have. Other options only
        affect speed."""
        own: Any = self
        size = own.train_mb_size
        own.dataloader = ShareLoader(own.adapted_dataset, size, shuffle, num_workers, drop_last)

    def make_eval_dataloader(self, *, num_workers: int = 0, **kwargs: Any) -> None:
        """This process's share of the batches that one process would have."""
        own: Any = self
        own.dataloader = ShareLoader(own.adapted_dataset, own.eval_mb_size, False, num_workers)

    def _before_training_exp(self, **kwargs: Any) -> None:
        self.parallel_model = None  # the model may have grown
        super()._before_training_exp(**kwargs)  # type: ignore[misc]
        own: Any = self
        self.shares = None
        if not isinstance(own.dataloader, ShareLoader):
            self.shares = own.dataloader = SharesOf(own.dataloader)

    def _after_training_exp(self, **kwargs: Any) -> None:
        super()._after_training_exp(**kwargs)  # type: ignore[misc]
        own: Any = self
        for value in chain.from_iterable(vars(plugin).values() for plugin in own.plugins):
            if isinstance(value, MultiDatasetDataLoader):
                value.distributed_sampling = False  # A-GEM's, before it draws its first batch

    def _before_training_epoch(self, **kwargs: Any) -> None:
        torch.set_rng_state(DistributedHelper.broadcast(torch.get_rng_state()))  # data order
        super()._before_training_epoch(**kwargs)  # type: ignore[misc]

    @property
    def batch_share(self) -> tuple[int, int]:
        """How many images of the current training batch are this process's and all processes'."""
        own: Any = self
        if self.shares is not None:
            return self.shares.batch_share
        start = own.clock.train_epoch_iterations * own.train_mb_size
        size = min(own.train_mb_size, len(own.adapted_dataset) - start)
        return len(_share(range(size), start)), size

    def whole_batch(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Columns of all images of the current training batch, from those of the shares."""
        if not DistributedHelper.is_distributed:
            return list(columns)
        own: Any = self
        images, size = self.batch_share
        start = own.clock.train_epoch_iterations * own.train_mb_size if self.shares is None else 0
        parts: list[list[Tensor]] = [[] for _ in range(DistributedHelper.world_size)]
        dist.all_gather_object(parts, [column[:images].cpu() for column in columns])
        whole = [column.new_empty(size, *column.shape[1:]) for column in columns]
        for rank, part in enumerate(parts):
            for column, share in zip(whole, part, strict=True):
                column[(rank - start) % len(parts) :: len(parts)] = share.to(column.device)
        return whole

    def forward(self) -> Tensor:
        """The model's output; in training through ``DistributedDataParallel``, with random numbers
        (as of dropout) that differ between processes and are the same after a resume."""
        own: Any = self
        if not own.is_training or not DistributedHelper.is_distributed:
            return super().forward()  # type: ignore[misc]
        if self.parallel_model is None:
            # All processes start with the same weights, and a posterior sample may be in place.
            self.parallel_model = DistributedDataParallel(own.model, init_sync=False)
        step = own.clock.train_iterations * DistributedHelper.world_size + DistributedHelper.rank
        devices = [own.device] if own.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((torch.initial_seed() + step) % 2**63)
            output: Tensor = self.parallel_model(own.mb_x)
        return output

    def backward(self) -> None:
        """Weight the loss, so that its average over the processes is the mean over all images of
        the batch."""
        own: Any = self
        local_size, global_size = self.batch_share
        own.loss = own.loss * (local_size * DistributedHelper.world_size / global_size)
        super().backward()  # type: ignore[misc]


def batch_share(strategy: Any) -> tuple[int, int]:
    """How many images of the current training batch are this process's and all processes'. Without
    :class:`DataParallel` each process has a batch of its own."""
    if isinstance(strategy, DataParallel):
        return strategy.batch_share
    size = len(strategy.mb_y)
    return size, size * DistributedHelper.world_size


def _share(batch: Any, start: int) -> Any:
    """Every ``world_size``-th example, by position in the epoch.

    :param start: position of the batch's first example.
    """
    processes = DistributedHelper.world_size
    return batch[(DistributedHelper.rank - start) % processes :: processes]


class ShareLoader(TensorLoader):
    """This process's share of the batches. A share without examples, of a last batch that is too
    small, has the batch's first one, which callers must not count.

    Random transforms draw other numbers in each process, and leave torch's global generator, which
    all processes need in the same state, as it is.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        num_workers: int,
        drop_last: bool = False,
    ) -> None:
        super().__init__(rows_of(dataset), dataset, batch_size, shuffle, drop_last)
        self.num_workers = num_workers

    def draw(self) -> tuple[int, Sequence[Tensor]]:
        base_seed, whole = super().draw()
        shares = [_share(batch, i * self.batch_size) for i, batch in enumerate(whole)]
        return base_seed, [own if len(own) else b[:1] for own, b in zip(shares, whole, strict=True)]

    def __iter__(self) -> Iterator[Any]:
        if self.rows is not None:
            yield from super().__iter__()
            return
        base_seed, shares = self.draw()
        generator = torch.Generator().manual_seed((base_seed + DistributedHelper.rank) % 2**63)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[own.tolist() for own in shares],
            num_workers=self.num_workers,
            collate_fn=self.dataset.collate_fn,
            pin_memory=torch.cuda.is_initialized(),
            generator=generator,
        )
        batches, state = iter(loader), generator.get_state()
        for _ in shares:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                batch = next(batches)
                state = torch.get_rng_state()
            yield batch


class SharesOf:
    """This process's share of the batches of a loader, which every process loads as a whole.

    :param whole: draws the same batches in all processes.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        if getattr(whole, "distributed_sampling", False):  # Avalanche's own shares
            whole.distributed_sampling = False
            main = whole.termination_dataset
            whole.n_iterations = -(-len(whole.datasets[main]) // whole.batch_sizes[main])
        self.batch_share = 0, 0
        """How many images of the last batch are this process's and all processes'."""

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.whole:
            size = len(batch[0])
            own = [_share(column, 0) for column in batch]
            self.batch_share = len(own[0]), size
            yield own if len(own[0]) else [column[:1] for column in batch]
