"""What the posterior samples of one optimizer step leave behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SampleRecord:
    """The samples drawn since the last step, and their gradients.

    With one sample, theta stays in its buffer and the gradient in ``p.grad``, so that
    whatever changes it before the step (unscaling, clipping) counts. With several, the
    sums are kept here and the average gradient is put into ``p.grad`` after the last one;
    a later change of its scale is carried over to ``grad * noise``.

    :param mc_samples: samples per step.
    """

    def __init__(self, mc_samples: int) -> None:
        self.mc_samples = mc_samples
        self.count = 0
        self._sample: dict[Tensor, Tensor] = {}  # one sample: theta
        self._grad: dict[Tensor, Tensor] = {}  # several: the sum; afterwards what p.grad is
        self._product: dict[Tensor, Tensor] = {}  # several: sum of grad * noise
        self._norm: dict[Tensor, Tensor] = {}  # several: norm of the average when handed out

    @property
    def complete(self) -> bool:
        """Whether a step may follow."""
        return self.count == self.mc_samples

    def covers(self, parameter: Tensor) -> bool:
        """Whether the parameter had a gradient in one of the samples."""
        return parameter in self._grad

    @torch.no_grad()
    def add(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take over one sample and its gradients (``p.grad``).

        :param samples: parameters, at their means again, and theta. The thetas are the
            record's until the step.
        """
        self.count += 1
        if self.mc_samples == 1:
            for p, theta in samples:
                if p.grad is not None:
                    self._sample[p], self._grad[p] = theta, p.grad
            return
        for p, theta in samples:
            grad, p.grad = p.grad, None
            if grad is None:
                continue
            product = theta.sub_(p).mul_(grad)
            if p in self._grad:
                self._grad[p].add_(grad)
                self._product[p].add_(product)
            else:
                self._grad[p], self._product[p] = grad.clone(), product.clone()
        if self.complete:
            for p, grad in self._grad.items():
                p.grad = grad.div_(self.mc_samples)
                self._product[p].div_(self.mc_samples)
                self._norm[p] = torch.linalg.vector_norm(grad)

    def still_in_grad(self) -> bool:
        """Whether a parameter's ``.grad`` is the very tensor handed out by the last sample,
        that is, nobody cleared it."""
        return any(p.grad is grad for p, grad in self._grad.items())

    def memory(self) -> int:
        """Bytes of what is kept here beside the buffers of the samples."""
        kept = [*self._product.values()] + ([*self._grad.values()] if self._product else [])
        return sum(t.numel() * t.element_size() for t in kept)

    def theta(self, parameter: Tensor) -> Tensor | None:
        """The sample, where there was only one."""
        return self._sample.get(parameter)

    def grad_times_noise(self, parameter: Tensor) -> Tensor:
        """Average over the samples of ``gradient * (theta - mean)``, in loss units."""
        assert parameter.grad is not None
        if self.mc_samples == 1:
            return (self._sample[parameter] - parameter.detach()) * parameter.grad
        norm = self._norm[parameter]
        scale = torch.linalg.vector_norm(parameter.grad) / norm
        return self._product[parameter] * torch.where(norm > 0, scale, torch.ones_like(scale))
