"""The protocol shared by optimizers that hold a diagonal Gaussian posterior."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.optim.attachment import Attachment
from covon_avalanche.optim.checks import (
    check_finite,
    check_given,
    check_memory,
    check_parameter,
    check_precisions,
    has_entries,
)
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.named_optimizer import Group, NamedOptimizer, State
from covon_avalanche.optim.named_params import NamedParam, changed, note_step
from covon_avalanche.optim.natural_units import SCALARS, ess_of
from covon_avalanche.optim.samples import (
    Buffers,
    SampleAccumulator,
    SampleBuffer,
    align_state_,
    bump_versions,
    fill_normal_,
    next_noise_key,
    state_dtype,
)
from covon_avalanche.optim.sharding import is_sharded, local, sharded_like, whole
from covon_avalanche.posterior.gaussian import DiagGaussian, check_gaussian, embed


def first_precision(group: Group) -> float:
    """Precision of the prior of a group's parameters in the first task (1/weight²)."""
    return ess_of(group) * float(group["weight_decay"])


def current_prior(state: State, group: Group) -> tuple[Any, Any]:
    """Mean and precision of a parameter's prior; numbers until the first consolidation."""
    return state.get("prior_mean", 0.0), state.get("prior_precision", first_precision(group))


def prior_dtype(p: Tensor, group: Group) -> torch.dtype:
    """What mean and precision of a parameter's prior are kept in."""
    return torch.bfloat16 if group.get("bfloat16_prior") else state_dtype(p)


class PosteriorOptimizer(NamedOptimizer):
    """Base of :class:`CoVON` and :class:`BayesByBackprop`.

    The parameters themselves are the posterior's mean. One step is::

        with optimizer.sampled_params():        # theta ~ q inside, the mean again outside
            optimizer.zero_grad()
            criterion(model(x), y).backward()
        optimizer.step()

    and a task ends with ``optimizer.consolidate()``. Rules:

    - Exactly ``mc_samples`` samples belong to a step. Micro-batches of one sample go
      inside one ``sampled_params()``, where their gradients add up.
    - Forward *and* backward pass belong inside; outside, torch calls the weights "modified by an
      inplace operation". Not noticed: the forward pass of a single linear layer outside, and one
      more backward pass between a sample and ``step()``.
    - Inside, the parameters *are* the sample: copies of the model, ``model.state_dict()`` and
      updates of averages (EMA, SWA) belong outside. Changes of weights inside, or between two steps
      of a task, are errors, except of ``p.data``. See ``docs/how-to/common-mistakes.md``.
    - Gradients stay in ``p.grad`` until ``step()``: clipping and unscaling work as with Adam.
    - Frozen parameters are not perturbed in training; predictions sample all that have a posterior.
    - Parameters without a gradient are not updated, and if they receive none during a whole task,
      their posterior stays unchanged.
    - An exception leaves every parameter at the mean and nothing recorded. Ctrl-C takes effect
      before or after ``step``, ``consolidate`` and the change of weights, never within.
    - ``step(closure)`` calls the closure once in each of ``mc_samples`` samples.
    - Noise is a function of a seed and a draw counter, both stored in the first group
      (``noise_seed``, ``noise_draws``), so ``state_dict()``, copies and pickles restore it.
    """

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        prior: DiagGaussian | None,
        generator: torch.Generator | None,
    ) -> None:
        self._generator = generator
        self._attachment = Attachment()
        self._placeholders = False  # whether the state only waits for one that is loaded
        super().__init__(params, {**defaults, "noise_seed": None, "noise_draws": 0})
        self._start_unsampled()
        if prior is not None:
            self._set_prior(prior)

    def _start_unsampled(self) -> None:
        """Set what neither copies nor states contain."""
        self._buffers: Buffers = {}  # theta; while it is in place the mean
        self._in_place: Buffers = {}  # swapped at the moment
        self._record = self._new_record()

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning's wrapper inherits this class, but reads its attributes from the optimizer:
        set them there."""
        own = vars(self)
        object.__setattr__(self if name in own else own.get("_optimizer", self), name, value)

    # What an algorithm defines ---------------------------------------------------------

    @abstractmethod
    def _start_task(self, p: Tensor, group: Group) -> State:
        """State entries of a parameter that begin anew with its first step in a task."""

    @abstractmethod
    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor:
        """Precision (1/weight²) to sample a parameter with, to train or to predict: a new tensor.
        For prediction, the parameter has a state."""

    @abstractmethod
    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        """New mean and changed state entries after a step, as new tensors.

        :param grad: average gradient over the samples.
        :param statistic: average over the samples of what :class:`SampleAccumulator` describes.
        """

    @abstractmethod
    def consolidate(self) -> None:
        """End a task: the posterior becomes the prior of the next."""

    # Sampling --------------------------------------------------------------------------

    @property
    def mc_samples(self) -> int:
        """Samples per step, the same in all groups."""
        return int(self.param_groups[0]["mc_samples"])

    @contextmanager
    def sampled_params(self, train: bool = True, temperature: float = 1.0) -> Iterator[None]:
        """Context manager that replaces the parameters by a sample of the posterior.

        :param train: record gradients for the next step; ``False`` samples for prediction
            and records nothing.
        :param temperature: factor of the posterior's variance, for prediction only.
        :raises RuntimeError: if nested; if weights were replaced since the last step, or changed
            inside; or if gradients of an earlier sample are neither stepped nor cleared, or were
            accumulated outside of a sample.
        :raises ValueError: if a precision is not positive, or a dtype cannot hold the noise.
        """
        with nullcontext() if train else self._attachment.aside():
            if self._in_place:
                raise RuntimeError(
                    "sampled_params() cannot be nested: a sample is already in place (in "
                    "Avalanche: a strategy needs one posterior plugin, and CoVONStrategy brings "
                    "its own; in Lightning: PosteriorCallback brings its own; after an interrupt "
                    "discard_samples() puts the mean back)"
                )
            if train:
                self._attachment.drop_sample()  # one that an evaluation has swapped out
            self._check_ess()
            check_positive("temperature", temperature)
            if train and temperature != 1:
                raise ValueError(
                    f"a temperature is for prediction (train=False), got {temperature}"
                )
            drawn: Buffers = {}
            try:
                self._place_sample(train, temperature)
                drawn |= self._in_place
                yield
                self._restore_mean(check=True)
            except BaseException:
                self._restore_mean()
                if drawn and train:  # one that could not be drawn leaves others waiting
                    self._record = self._new_record()
                raise
            if train:
                self._record_sample(drawn)

    def attach(self, model: nn.Module) -> Attachment:
        """Sample in a training loop that stays as it is::

            optimizer.attach(model)             # then, with the same result bit for bit:
            criterion(model(x), y).backward()   # the first forward pass places a sample
            optimizer.step()                    # restores the mean first

        A sample serves all forward passes with gradients in training mode until ``step()``;
        evaluations (``model.eval()`` or ``torch.no_grad()``) and ``model.state_dict()`` see the
        mean, between micro-batches, too, and ``sampled_params(train=False)`` draws samples of its
        own. An exception in the forward pass drops the sample. After one elsewhere, or a step that
        a ``GradScaler`` skips, the sample stays for the next step, and :meth:`discard_samples`
        drops it. Copies and pickles are not attached. Attaching another optimizer of the same
        parameters detaches this one.

        :param model: the module that the loop calls, after ``torch.compile`` and
            DistributedDataParallel.
        :return: its ``remove()`` detaches the model.
        :raises ValueError: with several samples per step, whose forward passes a hook cannot tell
            apart, or for sharded parameters, which FSDP's own hooks gather.
        """
        if self.mc_samples != 1:
            raise ValueError(f"attach() needs one sample per step, got {self.mc_samples}")
        for named in self._named_params():
            if is_sharded(named.param):
                raise ValueError(f"{named.name!r} is sharded: use sampled_params(), not attach()")
        if self._attachment.is_attached:
            raise ValueError(
                "a model is already attached: remove() it, or attach a module that contains both"
            )
        self._attachment = Attachment(self)
        self._attachment.to(model)
        return self._attachment

    def hold_samples(self) -> Attachment:
        """For callbacks of a training loop, which place and restore the sample of a step.

        :return: its ``place_sample()`` begins a step and ``end_sample()`` ends it; ``swap_out()``
            and ``swap_in()`` surround what needs the mean in between. If a model is attached, it
            is what :meth:`attach` returned.
        """
        if not self._attachment.is_attached:
            self._attachment = Attachment(self)
        return self._attachment

    def unattached(self) -> AbstractContextManager[None]:
        """Context manager: an attached model draws no samples, in whatever mode it is called."""
        return self._attachment.suspended()

    @property
    def can_sample(self) -> bool:
        """Whether the settings determine a posterior."""
        return all(group["ess"] is not None for group in self.param_groups)

    def _check_ess(self) -> None:
        if not self.can_sample:
            raise ValueError(
                "ess must be set before the posterior is used: give it, or ess_per_example and "
                "examples, which CoVONPlugin sets"
            )

    def discard_samples(self) -> None:
        """Drop the samples drawn since the last step, and put back the mean if an interrupt has
        left a sample in place."""
        self._attachment.drop_sample()
        self._restore_mean()
        self._record = self._new_record()

    def _new_record(self) -> SampleAccumulator:
        return SampleAccumulator(self.mc_samples)

    @torch.compiler.disable
    def _place_sample(self, train: bool, temperature: float) -> None:
        """Draw a sample and swap it with the mean."""
        if train and self._record.count == 0:
            self._record = self._new_record()  # settings may have changed since
        if self._placeholders:  # nothing was loaded: the task begins at the present weights
            self._placeholders = False
            self.state.clear()
        if not self._buffers:  # weights may have been tied since the optimizer was made
            check_memory((n.name, n.param) for n in self._named_params())
        params = [
            n
            for n in self._named_params()
            if (n.param.requires_grad if train else self.state.get(n.param))
            and has_entries(n.param, n.name)
        ]
        # A sample that waits for its step keeps its buffer.
        waits = self._record.count > 0 and self.mc_samples == 1
        buffers = {} if waits else self._buffers
        self._match_loaded()
        if train:
            self._check_unchanged()
            for named in params:
                if named.param.grad is not None and not named.has_noted_grad:
                    named.note_grad(unused=local(named.param.grad).any())
        with defer_interrupt(), torch.no_grad():
            key = next_noise_key(self.param_groups[0], self._generator)
            drawn = self._draw(params, buffers, train, key)
            for named, buffer in drawn.items():
                if temperature != 1:
                    mean = self.mean_of(named.param)
                    noise = (buffer.content - mean).mul_(temperature**0.5)
                    buffer.content.copy_(noise.add_(mean))
                buffer.version = named.version
            self._swap_in(drawn)

    def _swap_in(self, drawn: Buffers, counted: bool = True) -> None:
        with defer_interrupt(), torch.no_grad():
            for named, buffer in drawn.items():
                buffer.swap_(named.param)
                self._in_place[named] = buffer
            self._count_swap(drawn, counted)

    @torch.compiler.disable
    def _restore_mean(self, check: bool = False, counted: bool = True) -> None:
        swapped = dict(self._in_place)
        names = [named.name for named, b in swapped.items() if named.version != b.version]
        with defer_interrupt(), torch.no_grad():
            for named, buffer in swapped.items():
                buffer.swap_(named.param)
                del self._in_place[named]
            self._count_swap(swapped, counted)
        if check and names:
            raise RuntimeError(
                f"{names[0]!r} was changed inside of sampled_params(), whose end restores the "
                "mean, or while a sample of an attached model waited for its step: load or clip "
                "weights, and step other optimizers, outside (nn.Embedding's max_norm does so in "
                "its forward pass)"
            )

    def _count_swap(self, swapped: Buffers, counted: bool) -> None:
        """Count all changes since samples were drawn as theirs, see :func:`bump_versions`.

        :param counted: ``False`` for a swap that will be undone, without backward pass between.
        """
        bump_versions(named.param for named in swapped if counted)
        for named, buffer in swapped.items():
            named.version = buffer.version

    def changed_weights(self) -> list[str]:
        """Names of parameters whose values have been replaced since the last step of this task, for
        instance by ``model.load_state_dict``; :meth:`consolidate` and the next sample then raise
        an error."""
        return [named.name for named in changed(self._named_params())]

    def _check_unchanged(self) -> None:
        """Refuse statistics that belong to other weights."""
        if names := self.changed_weights():
            raise RuntimeError(
                f"{names[0]!r} was replaced since the last step of this task (by "
                "load_state_dict, averaging, clipping or another optimizer?), but the posterior's "
                "precision belongs to the weights before: load the optimizer's state that was "
                "saved with them; optimizer.load_state_dict(optimizer.state_dict()) keeps this one"
            )

    @torch.compiler.disable
    def _record_sample(self, samples: Buffers) -> None:
        unused = (named.unused_grad for named in self._named_params())
        uncleared = [x for x in unused if x is not False]
        for named in self._named_params():
            named.note_unreached()
        if uncleared and torch.stack([x.to(uncleared[0].device) for x in uncleared]).any():
            if self._record.complete:
                raise RuntimeError(
                    f"all mc_samples={self.mc_samples} samples of this step were drawn already: "
                    "call step(), or zero_grad() to drop them, also after a skipped step; to "
                    "accumulate gradients, run all micro-batches inside one sampled_params()"
                )
            self.discard_samples()
            raise RuntimeError(
                "gradients were accumulated outside of a sample: call zero_grad() first, and run "
                "all micro-batches inside one sampled_params(), or in the closure (in Lightning: "
                "callbacks=[covon_avalanche.integrations.lightning.PosteriorCallback()])"
            )
        if self._record.complete:  # gradients were cleared instead of a step
            self._record = self._new_record()
        with defer_interrupt():
            try:
                self._record.add(samples)
            except BaseException:
                self.discard_samples()
                raise

    def _draw(self, params: list[NamedParam], buffers: Buffers, train: bool, key: int) -> Buffers:
        """Write samples into the buffers of parameters, which are added where they are missing."""
        lowest: list[tuple[str, Tensor]] = []
        drawn: Buffers = {}
        for named in params:
            p = named.param
            drawn[named] = self._buffer(buffers, named)
            precision = local(self._precision(p, named.group, train))
            if precision.numel():  # a process may have no row of a sharded parameter
                lowest.append((named.name, precision.min()))
            mean, content = self.mean_of(p), drawn[named].content
            sample = content if mean.dtype == p.dtype else torch.empty_like(mean)
            fill_normal_(sample, key, named.number)
            local(sample).mul_(precision.rsqrt()).add_(local(mean))
            if sample is not content:
                content.copy_(sample)
        check_precisions(lowest)
        return drawn

    def _buffer(self, buffers: Buffers, named: NamedParam) -> SampleBuffer:
        """A parameter's buffer; where a new one is needed, its state is converted to the new
        layout, too."""
        buffer, p = buffers.get(named), named.param
        if buffer is None or not buffer.fits(p):
            check_parameter(p, named.name, bfloat16=self.allows_bfloat16)
            align_state_(self.state.get(p, {}), p, named.name)
            buffer = buffers[named] = SampleBuffer(p)
        return buffer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; also drops a complete set of unused samples."""
        super().zero_grad(set_to_none)
        self._note_grads()
        if self._record.complete:
            self._record = self._new_record()

    def _note_grads(self) -> None:
        """After a step, or when gradients were cleared."""
        for named in self._named_params():
            named.note_grad()

    # Stepping --------------------------------------------------------------------------

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior with the recorded samples.

        :param closure: computes a loss and its gradients; called in ``mc_samples`` samples, or
            once in the sample that is in place, which it must end before it returns. After
            ``sampled_params()`` it is called once, without gradients.
        :return: the closure's loss, averaged over the samples, or ``None``.
        :raises RuntimeError: without ``mc_samples`` recorded samples, or with a closure after
            gradients were accumulated outside of a sample.
        :raises FloatingPointError: if a gradient is not finite, or so large that the new posterior
            would not be; names parameter, step and likely cause, and leaves everything as it was.
            CoVON guarantees this on CPUs only, see its documentation.
        """
        loss = None if closure is None else self._call(closure)
        self._attachment.end_sample()
        if self._in_place:
            raise RuntimeError("step() must be called outside of sampled_params()")
        if not self._record.complete:
            if self._only_initialises():
                return None
            advice = (
                "an attached model draws one when it is called in training mode (model.train()) "
                "with gradients; attach the module that the loop calls, by model(...)"
                if self._attachment.is_attached
                else "run forward and backward inside `with optimizer.sampled_params():` first "
                "(in Avalanche: plugins=[CoVONPlugin()], or VCLPlugin for BayesByBackprop; in the "
                "Trainer: callbacks=[PosteriorCallback()]; elsewhere: optimizer.attach(model))"
            )
            raise RuntimeError(
                f"step() needs mc_samples={self.mc_samples} samples, got {self._record.count}: "
                f"{advice}"
            )
        for group in self.param_groups:  # schedulers may have written settings
            self.check_group(group)
        params = self._params_with_gradient(self._record)
        with defer_interrupt(), torch.no_grad():
            record, self._record = self._record, self._new_record()
            self._step(params, record)
            note_step(params)
            self._note_grads()
        return loss

    def _call(self, closure: Callable[[], Any]) -> Any:
        """Call a closure in samples; return the mean loss."""
        record = self._record
        recorded = record.complete and any(n.param.grad is not None for n in record.buffers)
        if self._in_place or recorded:
            # After sampled_params(), as in Lightning's manual optimization, it has no gradients.
            with torch.set_grad_enabled(bool(self._in_place)):
                return closure()
        self.discard_samples()
        losses = []
        for _ in range(self.mc_samples):
            with torch.enable_grad(), self.sampled_params():
                losses.append(closure())
        return None if None in losses else sum(losses) / len(losses)

    def _only_initialises(self) -> bool:
        """Start the state for ``torch.distributed.checkpoint``, which asks an optimizer without
        state for it by a step with gradients and learning rates of zero."""
        params = [n for n in self._named_params() if n.param.grad is not None]
        if self.state or not params or any(group["lr"] != 0 for group in self.param_groups):
            return False
        if any(local(named.param.grad).any() for named in params):
            return False
        for named in params:
            self.state[named.param] = self._task_state(named.param, named.group)
        self._placeholders = True
        return True

    def _params_with_gradient(self, record: SampleAccumulator) -> list[NamedParam]:
        params = []
        for named in self._named_params():
            name, p = named.name, named.param
            if p.grad is None or not p.requires_grad or not p.numel():
                continue
            late = named.was_reached and local(p.grad).any()
            buffer = record.buffers.get(named)
            if buffer is None or late:
                raise RuntimeError(
                    f"{name!r} has a gradient that was computed outside of sampled_params(), or "
                    "was frozen when the sample was drawn: set requires_grad between steps"
                )
            if p.grad.is_sparse:
                raise ValueError(f"{name!r} has a sparse gradient, which is not supported")
            if not buffer.fits(p):
                raise RuntimeError(f"{name!r} was cast or moved between its sample and step()")
            if buffer.version != named.version:
                raise RuntimeError(f"{name!r} was changed between its sample and step()")
            params.append(named)
        return params

    def _step(self, params: list[NamedParam], record: SampleAccumulator) -> None:
        """Change the posterior: all of it, or, if anything is not finite, nothing."""
        proposals: list[tuple[Tensor, Tensor, State]] = []
        checks: list[tuple[str, str, Tensor]] = []
        for named in params:
            name, p = named.name, named.param
            assert p.grad is not None
            old = self._task_state(p, named.group)
            align_state_(old, p, name)
            former = old.get("mean", p)
            grad, statistic = p.grad.to(former.dtype), record.statistic(named, former)
            mean, new = self._propose(former, named.group, old, grad, statistic)
            checks.append((name, "gradient", p.grad))
            checks.append((name, "new mean", mean))
            checks += [(name, f"new {k}", v) for k, v in new.items() if torch.is_tensor(v)]
            proposals.append((p, mean, {**old, **new}))
        check_finite(checks, step=self._iteration())
        for p, mean, state in proposals:
            p.copy_(mean)
            self.state[p] = {**state, "mean": mean} if "mean" in state else state

    def _iteration(self) -> int:
        """The number of this step in its task, for errors."""
        return 1 + max((state.get("step", 0) for state in self.state.values()), default=0)

    def _task_state(self, p: Tensor, group: Group) -> State:
        """A parameter's state, begun anew before its first step in a task."""
        state = self.state.get(p, {})
        if state_dtype(p) != p.dtype and "mean" not in state:
            state = {**state, "mean": self.mean_of(p)}
        return state if "step" in state else {**self._start_task(p, group), **state}

    def _check_consolidation(self) -> None:
        self._attachment.drop_sample(check=True)
        if self._in_place:
            raise RuntimeError("consolidate() must be called outside of sampled_params()")
        for group in self.param_groups:
            self.check_group({**group, "lr": 0.0})  # a schedule may have passed its end
        self._match_loaded()
        self._check_unchanged()
        if self.param_groups[0]["noise_draws"] and not any(self.state.values()):
            warnings.warn(
                "no parameter of the optimizer has had a gradient: construct it after the model is "
                "copied, sharded or wrapped by PEFT, which make other parameters; or did early "
                "stopping go back to the start of the task?",
                stacklevel=3,
            )

    def _finish_task(self) -> None:
        """After consolidation."""
        self._buffers = {}
        for named in self._named_params():
            named.forget_step()
        self.discard_samples()

    # Posterior and prior ---------------------------------------------------------------

    @torch.no_grad()
    def posterior(
        self, named_parameters: Iterable[tuple[str, Tensor]] | None = None
    ) -> DiagGaussian:
        """The current posterior, as copies, over all parameters that have one: those trained
        in some task, or with a given prior. Sharded parameters are gathered: all processes must
        call it.

        :param named_parameters: names to use, for instance ``model.named_parameters()``.
            By default the names that the optimizer was given (pass
            ``model.named_parameters()`` to its constructor), else ``"group.index"``.
        :raises ValueError: for a parameter that is not in the optimizer.
        """
        means, precisions = {}, {}
        for named in self._renamed(named_parameters):
            if self.state.get(p := named.param):
                means[named.name] = whole(self.mean_of(p)).clone()
                precisions[named.name] = whole(self._precision(p, named.group, train=False))
        return DiagGaussian(means, precisions)

    @torch.no_grad()
    def prior(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> DiagGaussian:
        """The prior of the current task, as copies, over all parameters.

        :param named_parameters: see :meth:`posterior`.
        :raises ValueError: if ``ess`` is not set.
        """
        self._check_ess()
        means, precisions = {}, {}
        for named in self._renamed(named_parameters):
            name, p = named.name, named.param
            state = {**self._first_prior(self.mean_of(p), named.group), **self.state.get(p, {})}
            means[name] = whole(state["prior_mean"]).to(state_dtype(p), copy=True)
            precisions[name] = whole(state["prior_precision"]).to(state_dtype(p), copy=True)
        return DiagGaussian(means, precisions)

    def _first_prior(self, p: Tensor, group: Group) -> State:
        """State entries, as tensors, of a parameter that no task has trained yet."""
        options: Any = dict(dtype=prior_dtype(p, group), requires_grad=False)
        mean = torch.zeros_like(p, **options)
        if group.get("prior_mean") == "init":
            mean.copy_(p.detach())
        precision = torch.full_like(p, first_precision(group), **options)
        return {"prior_mean": mean, "prior_precision": precision}

    def mean_of(self, p: Tensor) -> Tensor:
        """The posterior's mean of a parameter, inside of a sample, too; not a copy. The mean of
        bfloat16 weights is float32."""
        swapped = (buffer.content for named, buffer in self._in_place.items() if named.param is p)
        mean: Tensor = next(swapped, p.detach()) if self._in_place else p.detach()
        if mean.dtype != torch.bfloat16:
            return mean
        state = self.state.get(p, {})
        if "mean" in state:
            kept: Tensor = state["mean"]
            return kept
        exact = mean.float()
        prior_mean = state.get("prior_mean", exact)  # the mean between tasks, where it still is
        return torch.where(prior_mean.to(mean.dtype) == mean, prior_mean, exact)

    def _set_prior(self, prior: DiagGaussian) -> None:
        if not isinstance(prior, DiagGaussian):
            raise ValueError(f"prior must be a DiagGaussian, got {type(prior).__name__}")
        if any("param_names" not in group for group in self.param_groups):
            raise ValueError(
                "a prior is given by parameter name: construct the optimizer with "
                "model.named_parameters() instead of model.parameters(), or groups whose "
                "'params' are (name, parameter) pairs"
            )
        unknown = set(prior.mean) - {named.name for named in self._named_params()}
        if unknown:
            raise ValueError(f"the prior has parameters that are unknown here: {sorted(unknown)}")
        for named in self._named_params():
            name, p, group = named.name, named.param, named.group
            if name not in prior.mean:
                continue
            mean, precision = prior.mean[name], prior.precision[name]
            check_given(name, mean, p, "prior")
            check_gaussian(name, mean, precision)
            if is_sharded(p):
                mean, precision = sharded_like(mean, p), sharded_like(precision, p)
            options: Any = dict(dtype=prior_dtype(p, group), requires_grad=False)
            self.state[p] = {
                "prior_mean": torch.empty_like(p, **options).copy_(mean),
                "prior_precision": torch.empty_like(p, **options).copy_(precision),
            }

    @torch.no_grad()
    def restore_state(self, parameter: Tensor, saved: State) -> None:
        """Give a parameter the state saved for it, or for a smaller one that it replaces.

        Where the parameter has grown (a classifier with new classes), the old entries keep
        their state in the leading corner and the new ones start with the first prior.

        :param saved: a ``state[p]`` of this optimizer.
        :raises ValueError: if the saved tensors do not fit into the parameter, or it is not
            in the optimizer.
        """
        found = [named for named in self._named_params() if named.param is parameter]
        if not found:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not in the optimizer"
            )
        mean = parameter.detach().to(state_dtype(parameter))
        (named,) = found
        start = self._start_task(parameter, named.group)
        fresh = {"mean": mean, **start, **self._first_prior(mean, named.group)}
        self._buffers.pop(named, None)
        named.forget_step()
        zeros = torch.zeros_like(mean)
        self.state[parameter] = {
            key: embed(value, fresh.get(key, zeros))
            if torch.is_tensor(value) and value.dim() == parameter.dim()
            else copy.deepcopy(value)
            for key, value in saved.items()
        }

    @torch.no_grad()
    def allocate_state(self, keys: Iterable[str]) -> None:
        """Give a fresh optimizer the state entries of a checkpoint, so that
        ``torch.distributed.checkpoint`` can load them, after the first task, too::

            metadata = FileSystemReader(folder).read_metadata()
            optimizer.allocate_state(metadata.state_dict_metadata)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])

        :param keys: names of the checkpoint's values. Those of this optimizer end in
            ``state.NAME.ENTRY``, with the parameter names that it was constructed with.
        :raises ValueError: if the optimizer has a state already, or no key is of its parameters.
        """
        if self.state:
            raise ValueError("allocate_state() is for a fresh optimizer, this one has a state")
        found = [key.partition("state.")[2].rpartition(".") for key in keys]
        for named in self._named_params():
            entries = [entry for owner, _, entry in found if owner == named.name]
            if entries:
                p = named.param
                mean, of_prior = self.mean_of(p), prior_dtype(p, named.group)
                self.state[p] = {
                    entry: 0 if entry == "step" else mean.new_zeros(()) if entry in SCALARS
                    else torch.zeros_like(mean, dtype=of_prior if "prior" in entry else None)
                    for entry in entries
                }  # fmt: skip
        self._placeholders = bool(self.state)
        if not self.state:
            names = [named.name for named in self._named_params()]
            raise ValueError(
                f"no key of the checkpoint is of a parameter of this optimizer: {names}"
            )

    # torch.optim -----------------------------------------------------------------------

    def _check_params(self, added: list[NamedParam]) -> None:
        seen: set[Tensor] = set()
        for named in added:
            name, p = named.name, named.param
            if p.requires_grad:  # a frozen one has no noise
                check_parameter(p, name, bfloat16=self.allows_bfloat16)
                if p.dtype == torch.bfloat16 and named.group["mc_samples"] > 1:
                    raise ValueError(f"{name!r} is {p.dtype}, which needs mc_samples=1")
            if p in seen:  # a tied weight would be swapped and stepped twice
                raise ValueError(f"{name!r} is in its group a second time")
            seen.add(p)
        check_memory((named.name, named.param) for named in self._named_params())

    @property
    def allows_bfloat16(self) -> bool:
        """Whether weights may be bfloat16. Their mean is kept in float32 then, as ``"mean"`` in the
        state, and the weights are its rounded values, or those of a sample."""
        return False

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        check_positive("lr", group["lr"], zero=True)
        check_positive("weight_decay", group["weight_decay"], zero=True)
        if group["ess"] is not None:
            check_positive("ess", group["ess"])
            check_positive("ess * weight_decay", group["ess"] * group["weight_decay"], zero=True)
        check_whole("mc_samples", group["mc_samples"])
        check_whole("noise_draws", group["noise_draws"], least=0)
        if group["noise_seed"] is not None:
            check_whole("noise_seed", group["noise_seed"], least=0)
        if group["mc_samples"] != self.mc_samples:
            raise ValueError(
                f"mc_samples must be the same in all groups, got {group['mc_samples']} and "
                f"{self.mc_samples}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state, the noise included.

        :raises RuntimeError: inside of ``sampled_params()``.
        :raises ValueError: for the state of another optimizer, one of parameters with other names,
            or one that is damaged, naming the parameter; nothing is changed then.
        """
        if self._in_place:
            raise RuntimeError(
                "load_state_dict() must be called outside of sampled_params(): if a sample of an "
                "attached model waits for its step, discard_samples() first, then load the weights"
            )
        super().load_state_dict(state_dict)

    def _match_loaded(self) -> None:
        """The base's check; besides, bfloat16 weights that are not the loaded mean, rounded, were
        not saved with it, and are the mean."""
        if self._loaded_squares is None:
            return
        with defer_interrupt():
            super()._match_loaded()
            for p, state in self.state.items():
                if (mean := state.get("mean")) is not None:
                    mean = mean.to(p.device)
                    exact = mean.to(p.dtype) == p.detach()
                    state["mean"] = torch.where(exact, mean, p.detach().float())

    def __getstate__(self) -> dict[str, Any]:
        if self._in_place:
            raise RuntimeError(
                "copy and pickle model and optimizer outside of sampled_params(): inside, the "
                "parameters are a sample instead of the mean"
            )
        own = {"_generator": self._generator, "_placeholders": self._placeholders}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_attachment"):  # of a copy, not while a state is loaded
            self._attachment = Attachment()
        self._placeholders = state.get("_placeholders", False)
        self._start_unsampled()
