"""The second copy of the weights that sampling needs, and how it takes their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor

BLOCK = 2**17  # entries worked on at a time, where whole tensors would need transient memory
_LARGE = 2**16  # entries from which the place of a buffer in memory matters
_STEP = 112  # entries between the places of two buffers, a multiple of a cache line


def empty_beside(p: Tensor, place: int) -> Tensor:
    """An uninitialised tensor of the parameter's shape and strides for its state.

    Large CPU tensors begin at the same offset in a page, so that the same entry of seven of
    them competes for the eight places of one cache set; the ``place`` shifts a tensor to
    another set.

    :param place: another small number for each tensor that a step reads together.
    """
    if p.device.type != "cpu" or p.numel() < _LARGE or not is_dense(p):
        return torch.empty_like(p, requires_grad=False)
    storage = torch.empty(p.numel() + place * _STEP, dtype=p.dtype)
    return storage.as_strided(p.shape, p.stride(), place * _STEP)


def free_places(p: Tensor, state: Mapping[str, object]) -> Iterator[int]:
    """Places for :func:`empty_beside` that no tensor of the parameter's state has, from 2 on
    (1 is that of the samples)."""
    tensors = (value for value in state.values() if isinstance(value, Tensor))
    taken = {value.storage_offset() // _STEP for value in tensors}
    return (place for place in count(2) if place not in taken)


def is_dense(p: Tensor) -> bool:
    """Whether the entries fill their piece of memory without gaps, in whatever order."""
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat_blocks(tensors: list[Tensor], block: int = BLOCK) -> list[list[Tensor]]:
    """Cut tensors of the same shape and strides into views of at most ``block`` entries.

    :return: for each block the pieces of all tensors, in order of memory.
    """
    if not is_dense(tensors[0]):
        return [tensors]
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    return [list(pieces) for pieces in zip(*(t.split(block) for t in flat), strict=True)]


class SecondCopy:
    """A buffer of a parameter's size that can change contents with it.

    A parameter that has its memory to itself takes that of the buffer, which costs nothing;
    one that shares it (with a flattened model, with other processes, a tensor subclass) is
    overwritten in place.
    """

    def __init__(self, p: Tensor) -> None:
        self.content = empty_beside(p, 1)
        self._layout = (p.device, p.dtype, p.shape, p.stride())
        plain = type(p) in (Tensor, torch.nn.Parameter)
        self._takes_memory = plain and _owns_its_memory(p)

    def fits(self, p: Tensor) -> bool:
        """Whether the parameter still has the device, dtype and layout it had."""
        return self._layout == (p.device, p.dtype, p.shape, p.stride())

    def exchange(self, p: Tensor) -> None:
        """The parameter gets the buffer's content, the buffer the parameter's; to be called
        without gradients."""
        if self._takes_memory:
            former = p.data
            p.data = self.content
            self.content = former
        else:
            for mine, other in flat_blocks([p.detach(), self.content]):
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)


def moved(parameters: Iterable[Tensor]) -> None:
    """Tell autograd that the content has changed, so that a backward pass through the old one
    is an error instead of a wrong gradient."""
    torch.autograd.graph.increment_version(list(parameters))


def second_copy(copies: dict[Tensor, SecondCopy], p: Tensor) -> SecondCopy:
    """The parameter's copy among those given; a new one is added where none fits."""
    if p not in copies or not copies[p].fits(p):
        copies[p] = SecondCopy(p)
    return copies[p]


def _owns_its_memory(p: Tensor) -> bool:
    whole = p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return whole and not p.is_shared()
