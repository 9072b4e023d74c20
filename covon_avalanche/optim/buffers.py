"""The second copy of the weights that sampling needs, and how it takes their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**17  # entries worked on at a time, where whole tensors would need transient memory
DEVICE_BLOCK = 2**24  # the same where no cache is to be kept warm and each launch costs
_LARGE = 2**16  # entries from which it matters where a buffer begins in memory
_SHIFT = 112  # entries between the slots of two buffers, a multiple of a cache line
SAMPLE_SLOT, PRIOR_MEAN_SLOT, PRIOR_PRECISION_SLOT = 1, 4, 5  # of what has a fixed one


def empty_beside(p: Tensor, slot: int) -> Tensor:
    """An uninitialised tensor of the parameter's shape and strides for its state.

    Large CPU tensors begin at the same offset in a page, so that the same entry of seven of
    them competes for the eight lines of one cache set; the ``slot`` shifts a tensor to
    another set.

    :param slot: another small number for each tensor that a step reads together.
    """
    with torch.inference_mode(False):  # a prediction may be the first to need it, training next
        if p.device.type != "cpu" or p.numel() < _LARGE or not is_dense(p):
            return torch.empty_like(p, requires_grad=False)
        storage = torch.empty(p.numel() + slot * _SHIFT, dtype=p.dtype, device=p.device)
        return storage.as_strided(p.shape, p.stride(), slot * _SHIFT)


def free_slots(p: Tensor, state: Mapping[str, object]) -> Iterator[int]:
    """Slots for :func:`empty_beside` that no tensor of the parameter's state has, after that of
    the samples."""
    tensors = (value for value in state.values() if isinstance(value, Tensor))
    taken = {value.storage_offset() // _SHIFT for value in tensors}
    return (slot for slot in count(SAMPLE_SLOT + 1) if slot not in taken)


def lies_like(value: Tensor, p: Tensor) -> bool:
    """Whether a tensor can be worked on together with the parameter in order of memory: it has
    its dtype, device, shape and strides. A parameter with gaps is not worked on in that order,
    so there strides do not count."""
    if value.dtype != p.dtype or value.device != p.device or value.shape != p.shape:
        return False
    return value.stride() == p.stride() or not is_dense(p)


def laid_like(value: Tensor, p: Tensor, name: str, what: str, slot: int = 0) -> Tensor:
    """The tensor, or a copy of it that lies like the parameter.

    :param name: of the parameter, for the error, as ``what`` the tensor is.
    :param slot: see :func:`empty_beside`.
    :raises ValueError: if it has another shape.
    """
    if lies_like(value, p):
        return value
    if value.shape != p.shape:
        raise ValueError(
            f"{what} of {name!r} must have the parameter's shape {tuple(p.shape)}, "
            f"got {tuple(value.shape)}"
        )
    return empty_beside(p, slot).copy_(value)


def settle(name: str, p: Tensor, state: dict[str, Any]) -> None:
    """Let a parameter's state follow it, where the model was moved or cast, changed its
    memory format, or had another one when the state was saved.

    :raises ValueError: naming parameter and entry, if one has another shape.
    """
    slots = free_slots(p, state)
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = laid_like(value, p, name, key, next(slots))


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


def flat_blocks(tensors: list[Tensor], block: int | None = None) -> list[list[Tensor]]:
    """Cut tensors of the same shape and strides into views of at most ``block`` entries.

    :param block: by default what suits their device.
    :return: for each block the pieces of all tensors, in order of memory.
    :raises ValueError: for different strides, where the pieces would not fit together.
    """
    if not is_dense(tensors[0]):
        return [tensors]
    if block is None:
        block = BLOCK if tensors[0].device.type == "cpu" else DEVICE_BLOCK
    strides = {t.stride() for t in tensors}
    if len(strides) > 1:
        raise ValueError(f"tensors must have the same strides, got {sorted(strides)}")
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    return [list(pieces) for pieces in zip(*(t.split(block) for t in flat), strict=True)]


class SecondCopy:
    """A buffer of a parameter's size that can change contents with it.

    A parameter that has its memory to itself takes that of the buffer, which costs nothing;
    one that shares it (with a flattened model, with other processes, a tensor subclass) is
    overwritten in place.
    """

    def __init__(self, p: Tensor) -> None:
        self.content = empty_beside(p, SAMPLE_SLOT)
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
    is an error instead of a wrong gradient, and autocast, which keeps casts of weights."""
    torch.clear_autocast_cache()
    torch.autograd.graph.increment_version(list(parameters))


def second_copy(copies: dict[Tensor, SecondCopy], p: Tensor) -> SecondCopy:
    """The parameter's copy among those given; a new one is added where none fits."""
    copy = copies.get(p)
    if copy is None or not copy.fits(p):
        copy = copies[p] = SecondCopy(p)
    return copy


def _owns_its_memory(p: Tensor) -> bool:
    whole = p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return whole and not p.is_shared()
