"""What the posterior samples of one optimizer step leave behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covon_avalanche.optim.curvature import Curvature


class SampleRecord:
    """The samples drawn since the last step, and their gradients.

    With one sample, theta stays in its buffer and the gradient in ``p.grad``, so that
    whatever changes it before the step (unscaling, clipping) counts. With several, the
    sums are kept here and the average gradient is put into ``p.grad`` after the last one;
    a later change of its scale is carried over to the statistic.

    :param mc_samples: samples per step.
    :param curvature: the statistic.
    """

    def __init__(self, mc_samples: int, curvature: Curvature) -> None:
        self.mc_samples = mc_samples
        self.curvature = curvature
        self.count = 0
        self._sample: dict[Tensor, Tensor] = {}  # one sample: theta
        self._grad: dict[Tensor, Tensor] = {}  # several: the sum; afterwards what p.grad is
        self._statistic: dict[Tensor, Tensor] = {}  # several: the sum, then the average
        self._used_up: dict[Tensor, Tensor] = {}  # one sample: the statistic, in theta's memory
        self._norm: dict[Tensor, Tensor] = {}  # of the gradient when handed out, where it counts

    @property
    def complete(self) -> bool:
        """Whether a step may follow."""
        return self.count == self.mc_samples

    def covers(self, parameter: Tensor) -> bool:
        """Whether the parameter had a gradient in one of the samples."""
        return parameter in self._grad

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
                    if not self.curvature.from_gradient:
                        self._norm[p] = torch.linalg.vector_norm(p.grad)
            return
        with torch.no_grad():
            self._add_up(samples)

    def _add_up(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        for p, theta in samples:
            grad, p.grad = p.grad, None
            if grad is None:
                continue
            statistic = self.curvature.of(p, theta, grad)
            if p in self._grad:
                self._grad[p].add_(grad)
                self._statistic[p].add_(statistic)
            else:
                self._grad[p], self._statistic[p] = grad.clone(), statistic.clone()
        if self.complete:
            for p, grad in self._grad.items():
                p.grad = grad.div_(self.mc_samples)
                self._statistic[p].div_(self.mc_samples)
                self._norm[p] = torch.linalg.vector_norm(grad)

    def still_in_grad(self) -> bool:
        """Whether a parameter's ``.grad`` is the very tensor handed out by the last sample,
        that is, nobody cleared it."""
        return any(p.grad is grad for p, grad in self._grad.items())

    def memory(self) -> int:
        """Bytes of what is kept here beside the buffers of the samples."""
        kept = [*self._statistic.values()] + ([*self._grad.values()] if self._statistic else [])
        return sum(t.numel() * t.element_size() for t in kept)

    def theta(self, parameter: Tensor) -> Tensor:
        """The sample, where there was only one."""
        return self._sample[parameter]

    @torch.no_grad()
    def statistic(self, parameter: Tensor) -> Tensor:
        """Its average over the samples, at the scale of what ``parameter.grad`` is now. With
        one sample this uses up theta."""
        grad = parameter.grad
        assert grad is not None
        if self.mc_samples == 1:
            if parameter not in self._used_up:
                theta = self._sample.pop(parameter)
                self._used_up[parameter] = self.curvature.of(parameter, theta, grad)
            value = self._used_up[parameter]
            if self.curvature.from_gradient:
                return value
        else:
            value = self._statistic[parameter]
        norm = self._norm[parameter]
        scale = (torch.linalg.vector_norm(grad) / norm) ** self.curvature.power
        return value * torch.where(norm > 0, scale, torch.ones_like(scale))
