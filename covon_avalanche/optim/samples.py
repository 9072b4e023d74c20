"""What the posterior samples of one optimizer step leave behind."""

from __future__ import annotations

import torch
from torch import Tensor


class SampleRecord:
    """Gradients and noise of the samples drawn since the last step.

    With one sample the noise is kept and the gradient stays in ``p.grad``, so that
    whatever changes it before the step (unscaling, clipping) counts. With several, the
    sums are kept here and the average gradient is put into ``p.grad`` after the last one;
    a later change of its scale is carried over to ``grad * noise``.

    :param mc_samples: samples per step.
    """

    def __init__(self, mc_samples: int) -> None:
        self.mc_samples = mc_samples
        self.count = 0
        self._noise: dict[Tensor, Tensor] = {}  # one sample: theta - mean
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

    def add(self, noise: dict[Tensor, Tensor]) -> None:
        """Take over one sample's noise (``theta - mean``) and gradients (``p.grad``)."""
        self.count += 1
        noise = {p: n for p, n in noise.items() if p.grad is not None}
        if self.mc_samples == 1:
            self._noise = noise
            self._grad = {p: p.grad for p in noise if p.grad is not None}
            return
        for p, n in noise.items():
            grad, p.grad = p.grad, None
            assert grad is not None
            product = n.mul_(grad)
            self._grad[p] = self._grad[p].add_(grad) if p in self._grad else grad.clone()
            self._product[p] = self._product[p].add_(product) if p in self._product else product
        if self.complete:
            for p, grad in self._grad.items():
                p.grad = grad.div_(self.mc_samples)
                self._product[p].div_(self.mc_samples)
                self._norm[p] = torch.linalg.vector_norm(grad)

    def still_in_grad(self) -> bool:
        """Whether a parameter's ``.grad`` is the very tensor handed out by the last sample,
        that is, nobody cleared it."""
        return any(p.grad is grad for p, grad in self._grad.items())

    def grad_times_noise(self, parameter: Tensor) -> Tensor:
        """Average over the samples of ``gradient * (theta - mean)``, in loss units."""
        assert parameter.grad is not None
        if self.mc_samples == 1:
            return self._noise[parameter] * parameter.grad
        norm = self._norm[parameter]
        scale = torch.linalg.vector_norm(parameter.grad) / norm
        return self._product[parameter] * torch.where(norm > 0, scale, torch.ones_like(scale))
