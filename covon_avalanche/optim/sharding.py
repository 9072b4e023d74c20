"""Parameters whose rows are distributed over processes, as ``fully_shard`` (FSDP2) makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor."""
    return type(value) not in (Tensor, Parameter) and hasattr(value, "device_mesh")


def local(value: Any) -> Any:
    """This process's part of a DTensor; anything else itself."""
    return value.to_local() if is_sharded(value) else value


def check_sharding(p: Any, name: str) -> None:
    """Raise a ``ValueError`` unless at most one dimension of the mesh shards rows."""
    sharding = [placement for placement in p.placements if not placement.is_replicate()]
    by_rows = all(type(x).__name__ == "Shard" and x.dim == 0 for x in sharding)
    if len(sharding) > 1 or not by_rows:
        raise ValueError(
            f"{name!r} has placements {p.placements}: only parameters sharded along their first "
            "dimension by one dimension of the mesh are supported, as fully_shard makes them"
        )


def first_entry(p: Any) -> int:
    """How many entries of a parameter come before this process's part."""
    for dim, placement in enumerate(p.placements if is_sharded(p) else ()):
        if not placement.is_replicate():
            rows = -(-p.shape[0] // p.device_mesh.size(dim))
            before = min(p.device_mesh.get_local_rank(dim) * rows, p.shape[0])
            return int(before * (p.numel() // p.shape[0]))
    return 0


def sharded_like(whole: Tensor, p: Any) -> Tensor:
    """The parts of a tensor that all processes have, distributed as a DTensor is."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(p.to_local().device)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def everywhere(flags: Tensor, parameters: Iterable[Any]) -> Tensor:
    """Flags that are true where those of all processes are, if a parameter is distributed; all
    processes must call it with flags in the same order."""
    for mesh in dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p)):
        for group in mesh.get_all_groups():
            numbers = flags.int()
            dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
            flags = numbers.bool()
    return flags


def true_everywhere(flag: bool, parameters: list[Any]) -> bool:
    """Whether a flag is true in all processes, see :func:`everywhere`."""
    if not any(map(is_sharded, parameters)):
        return flag
    device = parameters[0].device
    return bool(everywhere(torch.tensor([flag], dtype=torch.bool, device=device), parameters))


def sum_everywhere(parts: list[Tensor], parameters: list[Any]) -> list[Tensor]:
    """The sums over all processes of scalars that belong to their parts of parameters; all
    processes must call it for the same parameters. Parameters that are not distributed keep
    theirs."""
    sums = list(parts)
    sharded = [i for i, p in enumerate(parameters) if is_sharded(p)]
    for mesh in dict.fromkeys(parameters[i].device_mesh for i in sharded):
        there = [i for i in sharded if parameters[i].device_mesh == mesh]
        total = torch.stack([sums[i] for i in there])
        for dim, placement in enumerate(parameters[there[0]].placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=mesh.get_group(dim))
        for i, value in zip(there, total.unbind(), strict=True):
            sums[i] = value
    return sums


def mean_everywhere(values: Any) -> Tensor:
    """The mean of all entries of a tensor, which may be distributed, as a scalar."""
    return sum_everywhere([local(values).sum()], [values])[0] / values.numel()


def whole(tensor: Any) -> Tensor:
    """The whole of a DTensor, for which all processes must call it; anything else itself."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found
