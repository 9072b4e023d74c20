"""CoVON and VCL in the ``Trainer`` of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "covon_avalanche.integrations.huggingface needs transformers and accelerate: "
        "pip install 'covon_avalanche[language]'"
    ) from error

from covon_avalanche.merging.batch_norm import batch_norms, update_batch_norm
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.attachment import Attachment
from covon_avalanche.optim.named_optimizer import unwrapped


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
        self._sample = Attachment()
        self._hooks = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer and how training is distributed.

        :raises ValueError: for another optimizer or one of other parameters, several samples per
            step, DeepSpeed, FSDP, or a checkpoint, to resume from or the best, without the
            optimizer's state.
        """
        _check_training(args)
        if self.consolidate and args.load_best_model_at_end and args.save_only_model:
            raise ValueError(
                "save_only_model=True saves the best checkpoint without the posterior, which "
                "load_best_model_at_end needs for the merge: leave it out"
            )
        model = kwargs["model"]
        optimizer = _posterior_optimizer(kwargs["optimizer"])
        self._sample.drop_sample()
        optimizer.discard_samples()
        self._sample = optimizer.hold_samples()
        groups = optimizer.param_groups
        if optimizer.defaults["weight_decay"] and not any(g["weight_decay"] for g in groups):
            raise ValueError("weight_decay=0 makes the prior flat: set it in TrainingArguments")
        names = {p: name for name, p in model.named_parameters()}
        if not any(p.requires_grad and p in names for group in groups for p in group["params"]):
            raise ValueError(
                "the optimizer has none of the parameters that the model trains: construct it from "
                "the model object that the Trainer gets (not its name), after PEFT has wrapped it "
                "(get_peft_model instead of peft_config)"
            )
        if state.global_step and not any("step" in own for own in optimizer.state.values()):
            raise ValueError(
                f"the checkpoint of step {state.global_step} was saved without the optimizer's "
                "state (save_only_model=True?), which has the posterior: resume from one with it"
            )
        # That of the state is found by the Trainer, or is the one of the checkpoint.
        size = state.train_batch_size if args.auto_find_batch_size else args.train_batch_size
        for group in groups:  # the Trainer makes groups without names
            if "batch_size" in group:
                shares = 1 if args.accelerator_config.split_batches else args.world_size
                batches = args.gradient_accumulation_steps * shares
                group["batch_size"] = size * batches
            if "param_names" not in group and all(p in names for p in group["params"]):
                group["param_names"] = [names[p] for p in group["params"]]
        # The Trainer has no callback for exceptions; others may evaluate and save within a step.
        self._hooks.close()
        self._hooks.enter_context(model.register_forward_pre_hook(self._before_forward))
        self._hooks.enter_context(model.register_state_dict_pre_hook(self._before_saving))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the weights by a sample, before the first micro-batch of a step."""
        self._sample.place_sample()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the mean, after the last micro-batch."""
        self._sample.end_sample()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop a step whose micro-batches are incomplete."""
        self._sample.drop_sample()
        _posterior_optimizer(kwargs["optimizer"]).zero_grad()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if model.training:
            self._sample.swap_in()
        else:
            self._sample.swap_out(counted=True)

    def _before_saving(self, *_: Any) -> None:
        self._sample.swap_out(counted=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge; if the best checkpoint's weights were loaded, with its statistics. Then
        re-estimate the running statistics of batch norm in a pass over the training data, of at
        most as many batches as in training."""
        optimizer = _posterior_optimizer(kwargs["optimizer"])
        optimizer.discard_samples()
        self._hooks.close()
        file = Path(state.best_model_checkpoint or "") / "optimizer.pt"
        saved = args.load_best_model_at_end and not args.save_only_model and file.is_file()
        if saved and optimizer.changed_weights():
            optimizer.rewind(torch.load(file, map_location="cpu", weights_only=True))
        if self.consolidate:
            optimizer.consolidate()
            model = _ByKeyword(kwargs["model"])
            most = state.max_steps * args.gradient_accumulation_steps  # streams may have no end
            update_batch_norm(model, islice(_batches(args, kwargs), most))
            _average_statistics(model, args.world_size)


def _batches(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """The Trainer's training data, for :class:`_ByKeyword`; any tensor of a batch as target."""
    for batch in kwargs["train_dataloader"]:
        moved = {k: v.to(args.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        yield moved, next(v for v in moved.values() if isinstance(v, Tensor))


def _average_statistics(model: nn.Module, processes: int) -> None:
    """Average batch norm's running statistics over processes, each of which has a share of the
    batches, as many as the others."""
    for norm in batch_norms(model) if processes > 1 else ():
        for statistic in (norm.running_mean, norm.running_var):
            if statistic is not None:
                dist.all_reduce(statistic)
                statistic /= processes


class _ByKeyword(nn.Module):
    """A model whose input is a batch; it gets those of its values that it takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Any:
        known = signature(self.model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        return self.model(**{k: v for k, v in batch.items() if takes_all or k in known})


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


def _check_training(args: Any) -> None:
    """Refuse what steps copies of the weights."""
    kind = str(getattr(args.distributed_state, "distributed_type", "")).rpartition(".")[2]
    if args.deepspeed is not None or kind == "DEEPSPEED":
        raise ValueError(
            "DeepSpeed steps copies of the weights, which PosteriorCallback cannot reach: use DDP"
        )
    if args.fsdp or kind == "FSDP":
        raise ValueError(
            "PosteriorCallback does not support fsdp in TrainingArguments, which replaces the "
            "weights: call covon_avalanche.integrations.huggingface.shard(model) before the "
            "optimizer is created"
        )


def _posterior_optimizer(wrapped: Any) -> PosteriorOptimizer:
    optimizer = unwrapped(wrapped)
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
