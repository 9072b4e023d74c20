"""CoVON and VCL in Lightning's automatic optimization."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from covon_avalanche.merging.batch_norm import batch_norms
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.attachment import Attachment


class PosteriorCallback(Callback):
    """Samples the weights around the micro-batches of each step, and merges at the end of ``fit``::

        def __init__(self):
            super().__init__()
            self.network = ...
            self.optimizer = CoVON(self.named_parameters(), lr=1e-3)

        def configure_optimizers(self):
            return self.optimizer

        Trainer(accumulate_grad_batches=4, callbacks=[PosteriorCallback()]).fit(module, loader)

    Every ``fit`` calls ``configure_optimizers``; an optimizer that is created there would start the
    next task without the posterior. The optimizer's ``batch_size``, the examples of all
    micro-batches and processes, is set if the loader has one: use ``drop_last=True``, and a number
    of micro-batches that is a multiple of the accumulation.

    One sample is in place during all micro-batches of a step; validation and checkpoints, even
    within a step, and the trained module see the mean. Checkpoints that ``fit`` writes precede the
    merge: call ``trainer.save_checkpoint`` afterwards, and test the module without ``ckpt_path``.
    Without accumulation the callback is needed for the merge and for checkpoints within a step
    only, since ``step(closure)`` samples, too.
    """

    def __init__(self, consolidate: bool = True) -> None:
        """
        :param consolidate: end the task when ``fit`` ends: the posterior becomes the next prior.
        """
        self.consolidate = consolidate
        self._process = os.getpid()
        self._sample = Attachment()
        self._hook = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the optimizer, and let checkpoints hold the mean.

        :raises ValueError: for another optimizer, several, or several samples per step, or if the
            posterior would be lost with a process that ``fit`` has started.
        """
        optimizer = _optimizer(trainer)
        if self.consolidate and os.getpid() != self._process:
            raise ValueError(
                "this strategy (ddp_notebook, ddp_fork or ddp_spawn) trains a copy of the "
                "optimizer, and its posterior is lost when fit ends: use strategy='ddp' in a "
                "script, or for a single task PosteriorCallback(consolidate=False)"
            )
        self._sample = optimizer.hold_samples()

        def replace_samples(
            module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
        ) -> None:
            """Store means: a signal or a time interval may make Lightning save within a step."""
            for name, p in module.named_parameters(
                prefix.removesuffix("."), remove_duplicate=False
            ):
                if name in state:
                    state[name] = optimizer.mean_of(p).to(p.dtype)

        self._hook.enter_context(pl_module.register_state_dict_post_hook(replace_samples))

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Replace the weights by a sample, the same for all micro-batches of a step, and set the
        optimizer's ``batch_size``."""
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if "batch_size" in (group := _optimizer(trainer).param_groups[0]) and size is not None:
            group["batch_size"] = size * trainer.accumulate_grad_batches * trainer.world_size
        self._sample.place_sample()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Restore the mean, after the last micro-batch."""
        self._sample.end_sample()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the mean, until the next micro-batch if a step is in progress."""
        self._sample.swap_out()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drop the sample of a step that was not completed."""
        self._discard(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the mean."""
        self._discard(trainer)
        self._hook.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Merge."""
        self._hook.close()
        if self.consolidate:
            _optimizer(trainer).consolidate()
            if batch_norms(pl_module):
                warnings.warn(
                    "batch norm's running statistics are those of samples from before the merge: "
                    "call covon_avalanche.merging.update_batch_norm after each task",
                    stacklevel=2,
                )

    def _discard(self, trainer: Any) -> None:
        if trainer.optimizers:
            _optimizer(trainer).discard_samples()


def _optimizer(trainer: Any) -> PosteriorOptimizer:
    optimizers = trainer.optimizers
    if len(optimizers) != 1 or not isinstance(optimizers[0], PosteriorOptimizer):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(f"PosteriorCallback needs one CoVON or BayesByBackprop, got {names}")
    optimizer = optimizers[0]
    if optimizer.mc_samples != 1:
        raise ValueError(
            f"PosteriorCallback draws one sample per step, got mc_samples = {optimizer.mc_samples}"
        )
    return optimizer
