"""Posterior samples in training loops that stay as they are, see ``PosteriorOptimizer.attach``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from covon_avalanche.optim.samples import Buffers

if TYPE_CHECKING:
    from covon_avalanche.optim.posterior_optimizer import PosteriorOptimizer


class Attachment:
    """The sample of a step, which is swapped out during evaluations, and the hooks of an attached
    model that place it."""

    def __init__(self, optimizer: PosteriorOptimizer | None = None) -> None:
        self._optimizer = optimizer
        self._sample: AbstractContextManager[None] | None = None  # that waits for its step
        self._swapped_out: Buffers = {}  # the sample during an evaluation
        self._is_aside = False
        self._hooks = ExitStack()
        self.is_attached = False

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        if self._sample is not None:
            raise RuntimeError("copy and pickle an attached model between two steps, not within")
        return Attachment, ()  # copies are not attached

    def to(self, model: nn.Module) -> None:
        """Register the hooks, in place of those of another optimizer of the same parameters, such
        as that of a notebook's cell before it was run again."""
        for hook in [*model._forward_pre_hooks.values()]:
            other = getattr(hook, "__self__", None)
            if isinstance(other, Attachment) and other._parameters() & self._parameters():
                other.remove()
        self.is_attached = True
        enter = self._hooks.enter_context
        enter(model.register_forward_pre_hook(self._before_forward, prepend=True))
        enter(model.register_forward_hook(self._after_forward, always_call=True))
        for module in model.modules():  # torch sets an attribute of the hook, so no bare method
            enter(module.register_state_dict_post_hook(partial(self._replace_sample)))

    def remove(self) -> None:
        """Detach the model; a sample that waits for its step is dropped.

        :raises RuntimeError: if others have changed weights since it was placed. The mean is back
            then, and a second call detaches the model.
        """
        self.drop_sample(check=True)
        self._hooks.close()
        self.is_attached = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model draws no samples inside; one that waits is dropped first."""
        self.drop_sample(check=True)
        with self.aside():
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The model draws no samples inside. One that waits for its step is swapped out, and in
        again afterwards."""
        evaluates = bool(self._swapped_out)  # the end of whose forward pass puts it back
        self.swap_out()
        if self._optimizer is not None and self._sample is not None:
            self._optimizer._buffers = {}  # it keeps its own
        outer, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = outer
            if not evaluates:
                self.swap_in()

    def place_sample(self) -> None:
        """Draw the sample of a step, or put back the one that was swapped out within the step."""
        self.swap_in()
        if self._optimizer is not None and not self._optimizer._in_place:
            sample = self._optimizer.sampled_params()
            sample.__enter__()
            self._sample = sample

    def end_sample(self) -> None:
        """Restore the mean and record the sample, before a step."""
        self.swap_in()
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.__exit__(None, None, None)

    def drop_sample(self, check: bool = False) -> None:
        """Restore the mean and record nothing; with ``check`` raise an error if others have changed
        the weights meanwhile."""
        if check:
            self.swap_out(counted=True)
        self._swapped_out = {}
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.__exit__(RuntimeError, RuntimeError("the step was not completed"), None)

    def _parameters(self) -> set[Tensor]:
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return {p for group in groups for p in group["params"]}

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        optimizer = self._optimizer
        if optimizer is None or self._is_aside or _recomputes():
            return
        if module.training and torch.is_grad_enabled():
            self.place_sample()
        else:
            self.swap_out()

    @torch.compiler.disable
    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_aside or _recomputes():
            return
        if self._swapped_out:
            self.swap_in()
        elif self._sample is not None and output is None and sys.exc_info()[0] is not None:
            self.drop_sample()

    def swap_out(self, counted: bool | None = None) -> None:
        """Restore the mean; the sample is dropped with an error if others have changed weights.

        :param counted: whether a backward pass through the sample's forward pass becomes an error;
            by default where gradients are on.
        """
        optimizer = self._optimizer
        if optimizer is not None and self._sample is not None and not self._swapped_out:
            in_place = dict(optimizer._in_place)
            counted = torch.is_grad_enabled() if counted is None else counted
            try:
                optimizer._restore_mean(check=True, counted=counted)
            except RuntimeError:
                self.drop_sample()
                raise
            self._swapped_out = in_place

    def swap_in(self) -> None:
        """Put back a sample that was swapped out, unless another is in place."""
        optimizer, sample = self._optimizer, self._swapped_out
        if optimizer is not None and sample and not optimizer._in_place:
            self._swapped_out = {}
            if any(named.version != buffer.version for named, buffer in sample.items()):
                self.drop_sample()  # it belongs to other weights
            else:
                optimizer._swap_in(sample, counted=torch.is_grad_enabled())

    def _replace_sample(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        if self._optimizer is not None and self._sample is not None:
            found = *self._optimizer._in_place, *self._swapped_out  # not another optimizer's
            sampled = {named.param for named in found}
            for name, p in module._parameters.items():
                if p in sampled and prefix + name in state:
                    state[prefix + name] = self._optimizer.mean_of(p).to(p.dtype, copy=True)


def _recomputes() -> bool:
    """Whether this forward pass is within a backward pass, as by gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1
