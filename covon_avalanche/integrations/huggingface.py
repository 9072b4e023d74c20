"""CoVON, VCL, Ada-Reg and EWC* in the ``Trainer`` of Hugging Face's transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "covon_avalanche.integrations.huggingface needs transformers and accelerate: "
        "pip install 'covon_avalanche[language]'"
    ) from error

from covon_avalanche.checks import check_whole
from covon_avalanche.merging.batch_norm import update_batch_norm
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.checks import check_parameter
from covon_avalanche.optim.quadratic_anchor import (
    QuadraticAnchor,
    adam_second_moments,
    check_adam_family,
)
from covon_avalanche.posterior import DiagGaussian
from covon_avalanche.posterior.fisher import squared_batch_gradients


class PosteriorCallback(TrainerCallback):
    """Samples the weights around each step's micro-batches, and merges at the end of training::

        optimizer = CoVON.finetuning(model.named_parameters(), lr=2e-5)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None),
                callbacks=[PosteriorCallback()]).train()

    One sample is in place during all micro-batches of a step; evaluation, checkpoints and logging
    see the mean. The optimizer's ``batch_size`` is set to the examples of all micro-batches and
    processes. The last step of an epoch has fewer unless ``dataloader_drop_last=True`` and the
    number of micro-batches is a multiple of the accumulation. A step that is incomplete at the end
    of an epoch, which happens with a streaming data set, is dropped. Checkpoints that ``train``
    writes precede the merge: call ``trainer.save_model()`` afterwards. To evaluate with a sample:
    ``with optimizer.sampled_params(train=False): trainer.evaluate()``.

    After an exception or Ctrl-C inside a step, the mean returns with the next evaluation, saving or
    training; for any other use call ``optimizer.discard_samples()``.
    """

    def __init__(self, consolidate: bool = True) -> None:
        """
        :param consolidate: end the task when training ends: the posterior becomes the next prior.
        """
        self.consolidate = consolidate
        self._sample = ExitStack()
        self._hooks = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check optimizer and precision.

        :raises ValueError: for another optimizer, several samples per step, weights in half
            precision, DeepSpeed or FSDP.
        """
        model = kwargs["model"]
        optimizer = _posterior_optimizer(kwargs["optimizer"])
        _check_training(args, model, type(self).__name__, bfloat16=optimizer.allows_bfloat16)
        self._discard_sample()
        optimizer.discard_samples()
        groups = optimizer.param_groups
        if optimizer.defaults["weight_decay"] and not any(g["weight_decay"] for g in groups):
            raise ValueError("weight_decay=0 makes the prior flat: set it in TrainingArguments")
        names = {p: name for name, p in model.named_parameters()}
        for group in groups:  # the Trainer makes groups without names, and may find a batch size
            if "batch_size" in group:
                batches = args.gradient_accumulation_steps * args.world_size
                group["batch_size"] = state.train_batch_size * batches
            if "param_names" not in group and all(p in names for p in group["params"]):
                group["param_names"] = [names[p] for p in group["params"]]
        # The Trainer has no callback for exceptions, and neither evaluates nor saves within a step.
        self._hooks.close()
        self._hooks.enter_context(model.register_forward_pre_hook(self._before_forward))
        self._hooks.enter_context(model.register_state_dict_pre_hook(self._discard_sample))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the weights by a sample, before the first micro-batch of a step."""
        optimizer = _posterior_optimizer(kwargs["optimizer"])
        self._sample.enter_context(optimizer.sampled_params())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the mean, after the last micro-batch."""
        self._sample.close()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop a step whose micro-batches are incomplete."""
        self._discard_sample()
        _posterior_optimizer(kwargs["optimizer"]).zero_grad()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not model.training:
            self._discard_sample()

    def _discard_sample(self, *_: Any) -> None:
        """Restore the mean if a step was left unfinished."""
        self._sample.__exit__(RuntimeError, RuntimeError("the step was interrupted"), None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge; if the best checkpoint's weights were loaded, with its statistics. Then
        re-estimate the running statistics of batch norm in a pass over the training data."""
        optimizer = _posterior_optimizer(kwargs["optimizer"])
        optimizer.discard_samples()
        self._hooks.close()
        file = Path(state.best_model_checkpoint or "") / "optimizer.pt"
        saved = args.load_best_model_at_end and not args.save_only_model and file.is_file()
        if saved and optimizer.changed_weights():
            optimizer.rewind(torch.load(file, map_location="cpu", weights_only=True))
        if self.consolidate:
            optimizer.consolidate()
            update_batch_norm(_Loss(kwargs["model"]), _batches(args, kwargs))


class _AnchorCallback(TrainerCallback, ABC):
    """Base of :class:`AdaRegCallback` and :class:`EWCStarCallback`: one object for all tasks."""

    def __init__(
        self, *, ess: float, strength: float = 1.0, gaussian: DiagGaussian | None = None
    ) -> None:
        """
        :param ess: effective sample size of a task, in examples.
        :param strength: multiplies each task's importance.
        :param gaussian: the anchor of an earlier session, ``callback.gaussian``.
        """
        self._options: dict[str, Any] = {"ess": ess, "strength": strength}
        self._anchor = QuadraticAnchor([], **self._options)
        self._pulling = ExitStack()
        self.gaussian = gaussian
        """The weights after the last task, and the precision of the pull toward them."""

    @abstractmethod
    def _importance(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Curvature per example of the task just trained, by parameter name."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer, and begin to pull.

        :raises ValueError: for a posterior optimizer, weights in half precision, DeepSpeed or FSDP.
        """
        _check_training(args, kwargs["model"], type(self).__name__)
        optimizer = _unwrapped(kwargs["optimizer"])
        if isinstance(optimizer, PosteriorOptimizer):
            raise ValueError(
                f"{type(self).__name__} pulls the weights of AdamW or SGD to an anchor, got "
                f"{type(optimizer).__name__}, which has a prior: use PosteriorCallback"
            )
        named = kwargs["model"].named_parameters()
        self._anchor = QuadraticAnchor(named, **self._options, gaussian=self.gaussian)
        self._pulling.close()
        self._pulling.enter_context(self._anchor.pulling(optimizer))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the task: the weights become the anchor."""
        self._pulling.close()
        self._anchor.add(self._importance(args, kwargs))
        self.gaussian = self._anchor.gaussian


class AdaRegCallback(_AnchorCallback):
    """Ada-Reg (Algorithm 2): Adam's second moments are the importance of each weight::

        callback = AdaRegCallback(ess=len(data), strength=1e5)
        for data in tasks:
            Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

    Works with the Trainer's own AdamW, whose ``weight_decay`` should be 0; pass the same callback
    for each task. Adam's state is cleared at the start of each.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer, clear its state unless training resumes, and begin to pull.

        :raises ValueError: for an optimizer that is not of the Adam family; and as
            :meth:`EWCStarCallback.on_train_begin`.
        """
        optimizer = _unwrapped(kwargs["optimizer"])
        check_adam_family(optimizer, type(self).__name__)
        super().on_train_begin(args, state, control, **kwargs)
        if state.global_step == 0:
            optimizer.state.clear()

    def _importance(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        optimizer = _unwrapped(kwargs["optimizer"])
        return adam_second_moments(kwargs["model"].named_parameters(), optimizer)


class EWCStarCallback(_AnchorCallback):
    """EWC* (Algorithm 3): squared gradients of mini-batches after each task are the importance.

    Used as :class:`AdaRegCallback`, with any optimizer without a posterior. The model must return
    its loss, averaged over the examples of a batch.
    """

    def __init__(self, *, batches: int | None = None, **options: Any) -> None:
        """
        :param batches: of the pass over the training data; by default all.
        :param options: ``ess``, ``strength`` and ``gaussian``, as of :class:`AdaRegCallback`.
        """
        super().__init__(**options)
        if batches is not None:
            check_whole("batches", batches)
        self.batches = batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See :class:`AdaRegCallback`.

        :raises ValueError: as that one, and with several processes.
        """
        if args.world_size > 1:
            raise ValueError(
                f"EWCStarCallback computes the Fisher information in one process, got "
                f"{args.world_size}: use AdaRegCallback"
            )
        super().on_train_begin(args, state, control, **kwargs)

    def _importance(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        batches = islice(_batches(args, kwargs), self.batches)
        found = squared_batch_gradients(_Loss(kwargs["model"]), batches, lambda loss, _: loss)
        return {name.removeprefix("model."): value for name, value in found.items()}


def _batches(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """The Trainer's training data, for :class:`_Loss`; any tensor of a batch as its target."""
    for batch in kwargs["train_dataloader"]:
        moved = {k: v.to(args.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        yield moved, next(v for v in moved.values() if isinstance(v, Tensor))


class _Loss(nn.Module):
    """A model's loss as its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss


def shard(model: Any) -> None:
    """Distribute a model's float32 weights over all processes of ``torchrun`` by FSDP2, layer by
    layer, for the Trainer with :class:`PosteriorCallback`; alone, a process keeps all.

    Call it before the optimizer is created, and before adapters of PEFT are added, which all
    processes keep. ``save_model`` writes the whole model.

    :param model: of transformers, the same in all processes.
    :raises ValueError: if the installed transformers cannot train models that are sharded already.
    """
    from accelerate import PartialState
    from torch.distributed.fsdp import fully_shard

    if not hasattr(type(model), "is_distributed_loading_by_transformers"):
        raise ValueError(
            "this version of transformers wraps sharded models in DDP: upgrade it, or use "
            "fully_shard in a loop of your own"
        )
    from transformers.distributed import DistributedConfig

    processes = PartialState(cpu=not torch.cuda.is_available())
    model.to(processes.device)
    if processes.num_processes > 1:
        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or ()):
                fully_shard(module)
        fully_shard(model, reshard_after_forward=True)  # else an evaluation's weights would stay
        model._is_distributed_loading_by_transformers = True
        model.config.distributed_config = DistributedConfig(fsdp_size=processes.num_processes)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Without the wrapper of Accelerate."""
    bare: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return bare


def _check_training(args: Any, model: nn.Module, user: str, *, bfloat16: bool = False) -> None:
    """Refuse what steps copies of the weights, and weights in half precision."""
    kind = str(getattr(args.distributed_state, "distributed_type", "")).rpartition(".")[2]
    if args.deepspeed is not None or kind == "DEEPSPEED":
        raise ValueError(
            f"DeepSpeed steps copies of the weights, which {user} cannot reach: use DDP"
        )
    if args.fsdp or kind == "FSDP":
        raise ValueError(
            f"{user} does not support fsdp in TrainingArguments, which replaces the weights: call "
            "covon_avalanche.integrations.huggingface.shard(model) before the optimizer is created"
        )
    for name, p in model.named_parameters():
        if p.requires_grad:
            check_parameter(p, name, bfloat16=bfloat16)


def _posterior_optimizer(wrapped: Any) -> PosteriorOptimizer:
    optimizer = _unwrapped(wrapped)
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
