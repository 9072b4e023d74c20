"""Posterior samples: their noise, the memory that holds them, and what they leave for a step.

The noise is a pure function of seed, draw and parameter number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from threading import get_ident
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from covon_avalanche.optim.named_params import NamedParam
from covon_avalanche.optim.sharding import first_entry, is_sharded, local, sharded_like

# Noise -----------------------------------------------------------------------------------

_BLOCK = 2**22  # entries that a torch generator draws at once


def noise_key(seed: int, draw: int) -> int:
    """The 64-bit key of a draw: SplitMix64's output number ``draw`` (Steele et al., 2014)."""
    mask = 2**64 - 1
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def next_noise_key(group: dict[str, Any], generator: torch.Generator | None) -> int:
    """The key of the next draw, counted in ``group["noise_draws"]``.

    :param group: an optimizer's first. The first draw sets its ``noise_seed``.
    :param generator: gives the seed; by default torch's global one.
    :raises ValueError: without a generator in a distributed run.
    """
    if group["noise_seed"] is None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if generator is None and several:
            raise ValueError(
                "DDP averages gradients first, so all ranks need identical noise: pass generator="
                "torch.Generator(device).manual_seed(seed) with the same seed on all ranks"
            )
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"generator must be a torch.Generator, got {generator!r}")
        device = "cpu" if generator is None else generator.device
        draw = torch.randint(2**63 - 1, (), generator=generator, device=device)
        group["noise_seed"] = int(draw)
    group["noise_draws"] += 1
    return noise_key(group["noise_seed"], group["noise_draws"])


def fill_normal_(out: Tensor, key: int, number: int) -> Tensor:
    """Replace all entries of a tensor by standard normals.

    On a CPU with numba they are those of ``cpu_kernel``; elsewhere those of a torch generator that
    is seeded by key, number and block. Each process's part of a DTensor gets the noise that
    it would have in the whole.

    :param out: any shape, dtype and device.
    :param key: of the draw, see :func:`noise_key`.
    :param number: of the parameter within the optimizer.
    """
    part = local(out)
    kernel = compiled_kernel() if out.device.type == "cpu" else None
    if kernel is not None and type(out) is Tensor and is_dense(out) and out.dtype == torch.float32:
        kernel.fill_normal(out.data_ptr(), out.numel(), key, number, 0)  # in order of memory
    elif kernel is None and part is out and out.numel() <= _BLOCK:
        generator = _generator(out.device, get_ident())
        out.normal_(generator=generator.manual_seed(noise_key(key, number)))
    else:
        noise = _noise(first_entry(out), part.numel(), out.numel(), key, number, part)
        part.copy_(noise.view(part.shape))
    return out


def _noise(begin: int, size: int, total: int, key: int, number: int, like: Tensor) -> Tensor:
    """Entries ``begin`` to ``begin + size`` of the noise of a parameter with ``total`` entries."""
    kernel = compiled_kernel() if like.device.type == "cpu" else None
    block = _BLOCK if kernel is None else kernel.GROUP
    first, skipped = divmod(begin, block)
    if kernel is not None:
        whole = torch.empty(skipped + size, dtype=torch.float32, device="cpu")
        kernel.fill_normal(whole.data_ptr(), whole.numel(), key, number, first)
        return whole[skipped:]
    generator = _generator(like.device, get_ident())
    seed = noise_key(key, number)
    parts = [like.new_empty(0)]
    for i in range(first, -(-(begin + size) // block)):
        generator.manual_seed(noise_key(seed, i) if i else seed)
        part = like.new_empty(min(block, total - i * block))
        parts.append(part.normal_(generator=generator))
    return torch.cat(parts)[skipped : skipped + size]


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """A thread's generator, to be seeded before each use."""
    return torch.Generator(device)


@cache
def compiled_kernel() -> ModuleType | None:
    """The module ``cpu_kernel``, or ``None`` where numba does not work."""
    try:
        import numba

        import covon_avalanche.optim.cpu_kernel as kernel
    except ImportError:  # numba is missing, or not available for this Python yet
        return None
    except RuntimeError as error:  # it finds no folder that it may write to
        warnings.warn(
            f"numba does not work here ({error}): CoVON falls back to torch operations, which are "
            "slower and draw other noise. Set NUMBA_CACHE_DIR to a writable folder",
            stacklevel=2,
        )
        return None
    return None if numba.config.DISABLE_JIT else kernel  # type: ignore[attr-defined]


def copy_rounded_(
    out: Tensor, values: Tensor, key: int, number: int, begin: int = 0, total: int | None = None
) -> None:
    """Copy values; into bfloat16 rounded up or down at random, with expectation equal to the value,
    so that changes below the resolution add up over many roundings.

    :param out: a part of a parameter.
    :param key: of the noise, see :func:`noise_key`.
    :param number: of the parameter within the optimizer.
    :param begin: entries of the parameter before this part.
    :param total: entries of the parameter, by default those of ``out``.
    """
    if out.dtype == torch.bfloat16:
        exact = values.float()
        noise = _noise(begin, out.numel(), total or out.numel(), key, number, exact)
        bits = noise.view(torch.int32)
        bits &= 0xFFFF  # the low bits of the noise are uniform
        bits += exact.flatten().view(torch.int32)
        bits &= -0x10000  # bfloat16 is the upper half of float32
        values = noise.view(out.shape)
    out.copy_(values)


# Memory ----------------------------------------------------------------------------------

_PIECE = 2**18  # entries that are worked on at once, on a CPU in its cache
_PIECE_ACCELERATOR = 2**24  # where small pieces mostly launch kernels


def is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill their memory without gaps, in whatever order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def pieces(tensor: Tensor, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Some rows at a time of tensors of one shape, so that temporaries are small; whatever has
    another number of dimensions comes with every piece."""
    largest = _PIECE if tensor.device.type == "cpu" else _PIECE_ACCELERATOR
    if tensor.numel() <= largest or not tensor.dim():
        yield tensor, *others
        return
    rows = max(1, largest // tensor[0].numel())
    for begin in range(0, len(tensor), rows):
        yield tuple(
            value[begin : begin + rows]
            if isinstance(value, Tensor) and value.dim() == tensor.dim()
            else value
            for value in (tensor, *others)
        )


def state_dtype(p: Tensor) -> torch.dtype:
    """What a parameter's mean and state are kept in: float32 for bfloat16, else its own dtype."""
    return torch.float32 if p.dtype == torch.bfloat16 else p.dtype


def match_layout(value: Tensor, p: Tensor, name: str, what: str, bfloat16: bool = False) -> Tensor:
    """The tensor itself, or a copy with the state's dtype, device and strides of a parameter.

    :param name: of the parameter, for the error.
    :param what: the tensor is, for the error.
    :param bfloat16: whether it may stay in bfloat16, as a prior may.
    :raises ValueError: if the shapes differ.
    """
    kept = value.dtype == torch.bfloat16 and (bfloat16 or what.startswith("prior_"))
    dtype = value.dtype if kept else state_dtype(p)
    if is_sharded(p) and not is_sharded(value) and value.shape == p.shape:
        return sharded_like(value.to(dtype), p)
    if _layout(value) == (p.device, dtype, p.shape, p.stride()):
        return value
    if value.shape != p.shape:
        raise ValueError(
            f"{what} of {name!r} must have the parameter's shape {tuple(p.shape)}, "
            f"got {tuple(value.shape)}"
        )
    same_kind = value.dtype == dtype and value.device == p.device
    if same_kind and not is_dense(p):  # never worked on in order of memory
        return value
    with torch.inference_mode(False):  # as in SampleBuffer
        return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value)


def align_state_(state: dict[str, Any], p: Tensor, name: str) -> None:
    """Give a parameter's state its layout, after the model was cast, moved or changed its memory
    format.

    :raises ValueError: naming parameter and entry, if one has another shape.
    """
    if state_dtype(p) == p.dtype:
        state.pop("mean", None)  # of weights that were bfloat16 before
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() == p.dim():
            state[key] = match_layout(value, p, name, key)
        elif isinstance(value, Tensor) and value.dim() == 0:  # one number for all entries
            state[key] = value.to(device=p.device, dtype=state_dtype(p))


class SampleBuffer:
    """Memory of a parameter's size that can swap contents with it.

    A parameter that has its memory to itself swaps it for that of the buffer, which costs nothing.
    One that shares it (with a flattened model, with other processes, a tensor subclass) is
    overwritten in place.
    """

    def __init__(self, p: Tensor) -> None:
        with torch.inference_mode(False):  # a prediction may need it first, and training next
            self.content = torch.empty_like(p, requires_grad=False)
        self._layout = _layout(p)
        plain = type(p) in (Tensor, torch.nn.Parameter)
        whole = plain and p.untyped_storage().nbytes() == p.numel() * p.element_size()
        self._owns_memory = whole and not p.is_shared()
        on_cpu = plain and p.device.type == "cpu" and p.dtype == torch.float32
        self.for_cpu_kernel = on_cpu and is_dense(p)
        """Whether the CPU kernel, which works on addresses, can handle the parameter."""
        self.version = 0
        """That of the :class:`NamedParam` when the sample was drawn."""

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the layout that the parameter had."""
        return self._layout == _layout(tensor)

    def swap_(self, p: Tensor) -> None:
        """Exchange the contents of buffer and parameter, which must not require gradients now."""
        if self._owns_memory:
            former = p.data
            p.data = self.content
            self.content = former
        else:
            former = p.detach().clone()
            p.data.copy_(self.content)  # the caller counts the change
            self.content.copy_(former)


Buffers: TypeAlias = dict[NamedParam, SampleBuffer]


def _layout(p: Tensor) -> tuple[object, ...]:
    return p.device, p.dtype, p.shape, p.stride()


def bump_versions(parameters: Iterable[Tensor]) -> None:
    """Tell autograd that contents have changed, so that a backward pass through the old ones is
    an error instead of a wrong gradient, and autocast, which caches casts of weights."""
    torch.clear_autocast_cache()
    torch.autograd.graph.increment_version(list(parameters))


# Gradients -------------------------------------------------------------------------------


class SampleAccumulator:
    """The samples drawn since the last step, with their gradients.

    With one sample, theta stays in its buffer and the gradient in ``p.grad``, so that whatever
    changes it before the step (unscaling, clipping) counts. With several, the sums of gradients
    and statistics are kept here and the average gradient is put into ``p.grad`` after the
    last one; what is done to it later (unscaling, clipping of its norm or of each entry) is done to
    the statistic, too, entry by entry.

    :param mc_samples: samples per step.
    :param squared: whether the statistic of a sample is ``gradient²`` instead of
        ``gradient * (theta - mean)``.
    """

    def __init__(self, mc_samples: int, squared: bool = False) -> None:
        self.mc_samples, self.squared = mc_samples, squared
        self.count = 0
        self.buffers: Buffers = {}
        """Buffers of the last sample, by parameter that had a gradient in one of the samples."""
        self._grad: dict[NamedParam, Tensor] = {}  # several: the sum, afterwards what p.grad is
        self._statistic: dict[NamedParam, Tensor] = {}  # several: the sum, afterwards the average
        self._average: dict[NamedParam, Tensor] = {}  # several: the average gradient as handed out

    @property
    def complete(self) -> bool:
        """Whether a step may follow."""
        return self.count == self.mc_samples

    @torch.no_grad()
    def add(self, samples: Buffers) -> None:
        """Record one sample and its gradients (``p.grad``).

        :param samples: theta by parameter, which must not change until the step, if one sample
            makes a step. The parameters are at their means again.
        """
        self.count += 1
        for named, buffer in samples.items():
            p = named.param
            if p.grad is None:
                continue
            self.buffers[named] = buffer
            if self.mc_samples == 1:
                continue
            grad, p.grad = p.grad, None
            statistic = self._statistic_of(p, buffer.content, grad)
            if named in self._grad:
                self._grad[named].add_(grad)
                self._statistic[named].add_(statistic)
            else:
                self._grad[named], self._statistic[named] = grad.clone(), statistic
        if self.complete and self.mc_samples > 1:
            for named, grad in self._grad.items():
                named.param.grad = grad.div_(self.mc_samples)
                self._statistic[named].div_(self.mc_samples)
                self._average[named] = grad.clone()

    def _statistic_of(self, p: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
        return grad.square() if self.squared else (theta - p).mul_(grad)

    @torch.no_grad()
    def statistic(self, named: NamedParam, mean: Tensor | None = None) -> Tensor:
        """Its average over the samples, a new tensor, at the scale of what ``p.grad`` is now.

        :param mean: by default the parameter itself; for bfloat16 its mean in float32.
        """
        p = named.param
        assert p.grad is not None
        mean = p if mean is None else mean
        if self.mc_samples == 1:
            return self._statistic_of(mean, self.buffers[named].content, p.grad.to(mean.dtype))
        grad, average = local(p.grad), local(self._average[named])
        norm = torch.linalg.vector_norm(average)
        whole = torch.where(norm > 0, torch.linalg.vector_norm(grad) / norm, 1.0)
        scale = torch.where(average != 0, grad / average, whole)
        statistic = self._statistic[named].clone()
        local(statistic).mul_(scale.square() if self.squared else scale)
        return statistic
