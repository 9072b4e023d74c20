"""What the posterior samples of one optimizer step leave behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SampleAccumulator:
    """The samples drawn since the last step, with their gradients.

    With one sample, theta stays in its buffer and the gradient in ``p.grad``, so that whatever
    changes it before the step (unscaling, clipping) counts. With several, the sums of gradients
    and statistics are kept here and the average gradient is put into ``p.grad`` after the
    last one; a later change of its scale is applied to the statistic, too.

    :param mc_samples: samples per step.
    :param squared: whether the statistic of a sample is ``gradient²`` instead of
        ``gradient * (theta - mean)``.
    """

    def __init__(self, mc_samples: int, squared: bool = False) -> None:
        self.mc_samples, self.squared = mc_samples, squared
        self.count = 0
        self._theta: dict[Tensor, Tensor] = {}  # one sample
        self._grad: dict[Tensor, Tensor] = {}  # several: the sum, afterwards what p.grad is
        self._statistic: dict[Tensor, Tensor] = {}  # several: the sum, afterwards the average
        self._norm: dict[Tensor, Tensor] = {}  # of the average gradient when it was handed out

    @property
    def complete(self) -> bool:
        """Whether a step may follow."""
        return self.count == self.mc_samples

    def covers(self, p: Tensor) -> bool:
        """Whether the parameter had a gradient in one of the samples."""
        return p in self._grad

    @torch.no_grad()
    def add(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Record one sample and its gradients (``p.grad``).

        :param samples: parameters, at their means again, and theta, which must not change until
            the step.
        """
        self.count += 1
        for p, theta in samples:
            if p.grad is None:
                continue
            if self.mc_samples == 1:
                self._theta[p], self._grad[p] = theta, p.grad
                continue
            grad, p.grad = p.grad, None
            statistic = self._statistic_of(p, theta, grad)
            if p in self._grad:
                self._grad[p].add_(grad)
                self._statistic[p].add_(statistic)
            else:
                self._grad[p], self._statistic[p] = grad.clone(), statistic
        if self.complete and self.mc_samples > 1:
            for p, grad in self._grad.items():
                p.grad = grad.div_(self.mc_samples)
                self._statistic[p].div_(self.mc_samples)
                self._norm[p] = torch.linalg.vector_norm(grad)

    def _statistic_of(self, p: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
        return grad.square() if self.squared else (theta - p).mul_(grad)

    def still_in_grad(self) -> bool:
        """Whether a parameter's ``.grad`` is the very tensor of the last sample, that is, whether
        nobody cleared it."""
        return any(p.grad is grad for p, grad in self._grad.items())

    def memory(self) -> int:
        """Bytes of what is kept here beside the buffers of the samples."""
        kept = [*self._statistic.values()] + ([*self._grad.values()] if self._statistic else [])
        return sum(t.numel() * t.element_size() for t in kept)

    def theta(self, p: Tensor) -> Tensor:
        """The sample, where there was only one."""
        return self._theta[p]

    @torch.no_grad()
    def statistic(self, p: Tensor) -> Tensor:
        """Its average over the samples, a new tensor, at the scale of what ``p.grad`` is now."""
        assert p.grad is not None
        if self.mc_samples == 1:
            return self._statistic_of(p, self._theta[p], p.grad)
        norm = self._norm[p]
        scale = torch.linalg.vector_norm(p.grad) / norm
        scale = torch.where(norm > 0, scale, torch.ones_like(scale))
        return self._statistic[p] * (scale.square() if self.squared else scale)
