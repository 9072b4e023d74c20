"""CoVON and VCL in the ``Trainer`` of Hugging Face's transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerCallback

from covon_avalanche.optim import PosteriorOptimizer


class PosteriorCallback(TrainerCallback):
    """Samples the weights around each step's micro-batches, and merges at the end of training::

        optimizer = CoVON(model.named_parameters(), ess=len(data), batch_size=256)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None),
                callbacks=[PosteriorCallback()]).train()

    One sample is in place during all micro-batches of a step; evaluation, checkpoints and logging
    see the mean. ``batch_size`` counts the examples of all micro-batches and processes. To evaluate
    with a sample: ``with optimizer.sampled_params(train=False): trainer.evaluate()``.
    """

    def __init__(self, consolidate: bool = True) -> None:
        """
        :param consolidate: end the task when training ends: the posterior becomes the next prior.
        """
        self.consolidate = consolidate
        self._sample: AbstractContextManager[None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check optimizer and precision.

        :raises ValueError: for another optimizer, several samples per step, or DeepSpeed.
        """
        if args.deepspeed is not None:
            raise ValueError("DeepSpeed steps its own copies of the weights: use DDP or FSDP2")
        self._sample = None
        _optimizer(kwargs["optimizer"]).discard_samples()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the weights by a sample, before the first micro-batch of a step."""
        self._sample = _optimizer(kwargs["optimizer"]).sampled_params()
        self._sample.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the mean, after the last micro-batch."""
        if self._sample is not None:
            sample, self._sample = self._sample, None
            sample.__exit__(None, None, None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge."""
        optimizer = _optimizer(kwargs["optimizer"])
        optimizer.discard_samples()
        if self.consolidate:
            optimizer.consolidate()


def _optimizer(wrapped: Any) -> PosteriorOptimizer:
    optimizer = getattr(wrapped, "optimizer", wrapped)  # of Accelerate
    if not isinstance(optimizer, PosteriorOptimizer):
        raise ValueError(
            f"PosteriorCallback needs a CoVON or BayesByBackprop optimizer, got "
            f"{type(optimizer).__name__}: pass optimizers=(optimizer, None) to the Trainer"
        )
    if optimizer.mc_samples != 1:
        raise ValueError(
            f"PosteriorCallback draws one sample per step, got mc_samples = {optimizer.mc_samples}"
        )
    return optimizer
