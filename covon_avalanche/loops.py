"""Mixins for Avalanche strategies: gradient accumulation, mixed precision, clipping."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor


class GradientAccumulation:
    """Mixin: averages the loss over the examples of several mini-batches in each step::

        class Accumulating(GradientAccumulation, Naive):
            accumulate = 4

    ``train_mb_size`` is what is on the device at once; the loader's batches of a step are drawn
    before it. Plugins see each mini-batch as usual, but ``before_update`` and ``after_update`` only
    where there is a step. The weights of a posterior optimizer are one sample during the
    mini-batches of a step; evaluate between epochs (``peval_mode="epoch"``), not within a step. The
    last step of an epoch may have fewer mini-batches. Strategies with a ``training_epoch`` of their
    own, such as DER, cannot be mixed with it.
    """

    accumulate: int = 2
    """Mini-batches per step."""

    def training_epoch(self, **kwargs: Any) -> None:
        """Avalanche's, with a step after every ``accumulate`` mini-batches."""
        own: Any = self
        if own.accumulate < 1:
            raise ValueError(f"accumulate must be >= 1, got {own.accumulate}")
        batches = iter(own.dataloader)
        while step := list(islice(batches, own.accumulate)):
            if own._stop_training:
                break
            sizes = [len(batch[1]) for batch in step]
            for i, size in enumerate(sizes):
                own.mbatch = step.pop(0)
                own._unpack_minibatch()
                groups = own.optimizer.param_groups if i > 0 else ()
                sums = [(p, p.grad) for group in groups for p in group["params"]]
                own._before_training_iteration(**kwargs)  # A-GEM and GEM clear and set gradients
                if i == 0:
                    own.optimizer.zero_grad()
                for p, grad in sums:
                    p.grad = grad
                own.loss = own._make_empty_loss()
                own._before_forward(**kwargs)
                own.mb_output = own.forward()
                own._after_forward(**kwargs)
                own.loss += own.criterion()
                own._before_backward(**kwargs)
                loss = own.loss
                own.loss = loss * size / sum(sizes)
                own.backward()
                own.loss = loss
                own._after_backward(**kwargs)
                if not step:
                    own._before_update(**kwargs)
                    own.optimizer_step()
                    own._after_update(**kwargs)
                own._after_training_iteration(**kwargs)


class Autocast:
    """Mixin: the model computes in bfloat16; losses, weights and the optimizer stay float32."""

    autocast_dtype = torch.bfloat16
    """Number format of the model's passes, those of merge rules included."""

    def forward(self) -> Tensor:
        """The strategy's output, as float32."""
        strategy: Any = self
        with torch.autocast(strategy.device.type, self.autocast_dtype):
            output: Tensor = super().forward()  # type: ignore[misc]
        return output.float()


class GradientClipping:
    """Mixin: clips the global norm of the gradients to ``max_grad_norm`` in each step."""

    max_grad_norm: float = 1.0

    def optimizer_step(self) -> None:
        """Clip, then step."""
        strategy: Any = self
        torch.nn.utils.clip_grad_norm_(strategy.model.parameters(), strategy.max_grad_norm)
        super().optimizer_step()  # type: ignore[misc]
