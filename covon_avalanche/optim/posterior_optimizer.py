"""The protocol shared by optimizers that hold a diagonal Gaussian posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from covon_avalanche.optim import noise
from covon_avalanche.optim.buffers import (
    PRIOR_MEAN_SLOT,
    PRIOR_PRECISION_SLOT,
    SecondCopy,
    empty_beside,
    moved,
    second_copy,
    settle,
)
from covon_avalanche.optim.checks import (
    check_finite,
    check_generator,
    check_parameter,
    check_positive,
    check_precisions,
    check_whole,
)
from covon_avalanche.optim.curvature import GRADIENT_TIMES_NOISE, Curvature
from covon_avalanche.optim.noise import NoiseSource
from covon_avalanche.optim.places import Group, NamedOptimizer, Place, State
from covon_avalanche.optim.samples import SampleRecord
from covon_avalanche.posterior.gaussian import DiagGaussian, check_gaussian, embed


class PosteriorOptimizer(NamedOptimizer, ABC):
    """Base of :class:`CoVON` and :class:`BayesByBackprop`.

    The parameters themselves are the posterior's mean. One step is::

        with optimizer.sampled_params():        # theta ~ q inside, the mean again outside
            optimizer.zero_grad()
            criterion(model(x), y).backward()
        optimizer.step()

    and a task ends with ``optimizer.consolidate()``. Rules:

    - Exactly ``mc_samples`` samples belong to a step. Micro-batches of one sample go
      inside one ``sampled_params()``, where their gradients add up.
    - Gradients stay in ``p.grad`` until ``step()``: clipping and unscaling work as with Adam.
    - Frozen parameters are not perturbed; those without a gradient are not moved, and a
      task that never gave them one leaves their posterior alone.
    - An exception leaves every parameter at the mean and nothing recorded.
    - The next sample may be drawn ahead: change weights between steps where torch counts it, under
      ``torch.no_grad()``, not through ``.data``.
    - ``step(closure)`` calls the closure once in each of ``mc_samples`` samples.
    - Copies and pickles carry the generator and the state, not a sample in flight.
    """

    own_setting: ClassVar[str]
    """A setting that no other optimizer has: it tells whose a ``state_dict`` is."""

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        prior: DiagGaussian | None,
        generator: torch.Generator | None,
    ) -> None:
        self._noise = NoiseSource(generator)
        self._copies: dict[Tensor, SecondCopy] = {}  # theta, and the mean while it is in place
        self._inside: list[tuple[Tensor, SecondCopy]] = []  # exchanged at the moment
        super().__init__(params, defaults)
        self.discard_samples()
        if prior is not None:
            self._install_prior(prior)

    # What an algorithm says ------------------------------------------------------------

    @abstractmethod
    def _start_task(self, p: Tensor, group: Group) -> State:
        """State entries of a parameter that begin anew with its first step in a task."""

    @abstractmethod
    def _first_prior(self, p: Tensor, group: Group) -> State:
        """State entries, as tensors, of a parameter that no task has trained yet."""

    @abstractmethod
    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor | float | None:
        """Precision (1/weight²) to sample a parameter with; to predict (``train=False``)
        ``None`` for one that nothing has trained and no prior was given for."""

    @abstractmethod
    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        """New mean and changed state entries after a step, as new tensors.

        :param grad: average gradient over the samples.
        :param statistic: average of what :meth:`_curvature` says, by default of
            ``gradient * (theta - mean)``.
        """

    @abstractmethod
    def consolidate(self) -> None:
        """End a task: the posterior becomes the prior of the next."""

    # Sampling --------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator | None:
        """Source of the noise: the given one, or one that the global seed has decided, made
        at the first sample."""
        return self._noise.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._noise = NoiseSource(generator)

    @property
    def mc_samples(self) -> int:
        """Samples per step, the same in all groups."""
        return int(self.param_groups[0]["mc_samples"])

    @contextmanager
    def sampled_params(self, train: bool = True) -> Iterator[None]:
        """Replace the parameters by a sample of the posterior inside the context.

        :param train: record gradients for the next step; ``False`` samples for prediction
            and records nothing.
        :raises RuntimeError: if nested, or if gradients of an earlier sample are neither
            stepped nor cleared.
        :raises ValueError: if a precision is not positive, or a dtype cannot hold the noise.
        """
        if train and self._record.count == 0:
            self.discard_samples()  # mc_samples may have changed since
        self._perturb(train)
        drawn = self._inside
        finished = False
        try:
            yield
            finished = True
        finally:
            self._restore()
            if train and not finished:
                self.discard_samples()
        if train:
            if self._record.complete:
                if self._record.still_in_grad():
                    raise RuntimeError(
                        f"all mc_samples={self.mc_samples} samples of this step were drawn "
                        "already: call step(), or zero_grad() to drop them; to accumulate "
                        "gradients, run all micro-batches inside one sampled_params()"
                    )
                self.discard_samples()
            try:
                self._record.add([(p, copy.content) for p, copy in drawn])
            except BaseException:
                self.discard_samples()  # half of a sample is none
                raise

    @torch.no_grad()
    def _perturb(self, train: bool) -> None:
        if self._inside:
            raise RuntimeError(
                "sampled_params() cannot be nested: a sample is already in place (in Avalanche: "
                "a strategy needs one posterior plugin, and CoVONStrategy brings its own)"
            )
        check_generator(self._noise.given)
        places = []
        for place in self._places():
            if place.parameter.requires_grad and place.parameter.numel():
                check_parameter(place.parameter, place.name)
                places.append(place)
        # A sample that waits for its step keeps its buffer; another one gets its own.
        waits = self._record.count > 0 and self.mc_samples == 1
        drawn = self._draw(places, {} if waits else self._copies, train)
        try:
            for p, copy in drawn:
                copy.exchange(p)
                self._inside.append((p, copy))
        except BaseException:
            self._restore()
            raise
        moved(p for p, _ in drawn)

    def _draw(
        self, places: list[Place], copies: dict[Tensor, SecondCopy], train: bool
    ) -> list[tuple[Tensor, SecondCopy]]:
        """Write samples into second copies: known ones, or new ones that are added."""
        lowest: list[tuple[str, Tensor]] = []
        drawn: list[tuple[Tensor, SecondCopy]] = []
        for place in places:
            p = place.parameter
            value = self._precision(p, place.group, train)
            if value is None:
                continue
            if not drawn:
                key = self._noise.key()
            precision = torch.as_tensor(value, dtype=p.dtype, device=p.device)
            lowest.append((place.name, precision.min()))
            copy = second_copy(copies, p)
            noise.fill_normal(copy.content, key, place.number)
            copy.content.mul_(precision.rsqrt()).add_(p)
            drawn.append((p, copy))
        check_precisions(lowest)
        return drawn

    @torch.no_grad()
    def _restore(self) -> None:
        inside, self._inside = self._inside, []
        for p, copy in inside:
            copy.exchange(p)
        moved(p for p, _ in inside)

    def discard_samples(self) -> None:
        """Forget the samples drawn since the last step, as if they had not been."""
        self._record = SampleRecord(self.mc_samples, self._curvature())

    def _curvature(self) -> Curvature:
        """The statistic of a sample that steps are made with, beside the gradient."""
        return GRADIENT_TIMES_NOISE

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; a complete set of samples that no step has used goes, too."""
        super().zero_grad(set_to_none)
        if self._record.complete:
            self.discard_samples()

    # Stepping --------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the posterior with the recorded samples.

        :param closure: computes a loss and its gradients; called in ``mc_samples`` samples.
        :return: the closure's loss, averaged over the samples, or ``None``.
        :raises RuntimeError: without ``mc_samples`` recorded samples.
        :raises FloatingPointError: if a gradient or the new posterior is not finite; names
            parameter, step and likely cause, and leaves everything as it was.
        """
        if self._inside:
            raise RuntimeError("step() must be called outside of sampled_params()")
        loss = None
        if closure is not None:
            self.discard_samples()
            losses = []
            for _ in range(self.mc_samples):
                with torch.enable_grad(), self.sampled_params():
                    losses.append(closure())
            loss = None if None in losses else sum(losses) / len(losses)
        if not self._record.complete:
            raise RuntimeError(
                f"step() needs mc_samples={self.mc_samples} samples, got {self._record.count}: "
                "run forward and backward inside `with optimizer.sampled_params():` first "
                "(in Avalanche: plugins=[CoVONPlugin()], or VCLPlugin for BayesByBackprop)"
            )
        record = self._record
        self.discard_samples()
        self._apply(record)
        return loss

    @torch.no_grad()
    def _apply(self, record: SampleRecord) -> None:
        places = []
        for place in self._places():
            p = place.parameter
            if p.grad is None or not p.requires_grad or not p.numel():
                continue
            if not record.covers(p):
                raise RuntimeError(
                    f"{place.name!r} has a gradient that was computed outside of sampled_params()"
                )
            if p.grad.is_sparse:
                raise ValueError(f"{place.name!r} has a sparse gradient, which is not supported")
            places.append(place)
        self._step(places, record)

    def _step(self, places: list[Place], record: SampleRecord) -> None:
        """Change the posterior: all of it, or, if anything is not finite, nothing."""
        proposals: list[tuple[Tensor, Tensor, State]] = []
        checks: list[tuple[str, str, Tensor]] = []
        for name, p, group, _ in places:
            assert p.grad is not None
            old = self.state.get(p, {})
            if "step" not in old:
                old = {**self._start_task(p, group), **old}
            settle(name, p, old)
            mean, new = self._propose(p, group, old, p.grad, record.statistic(p))
            state = {**old, **new}
            checks.append((name, "gradient", p.grad))
            checks.append((name, "new mean", mean))
            checks += [(name, f"new {k}", v) for k, v in new.items() if torch.is_tensor(v)]
            proposals.append((p, mean, state))
        steps = (state.get("step", 0) for state in self.state.values())
        check_finite(checks, step=max(steps, default=0) + 1)
        for p, mean, state in proposals:
            p.copy_(mean)
            self.state[p].update(state)

    def memory(self) -> dict[str, int]:
        """Bytes in use, by what they hold: ``parameters``, ``gradients``, each state entry,
        and ``samples``, the second copy of the weights that sampling needs."""
        sizes = {"parameters": 0, "gradients": 0}
        for p in (place.parameter for place in self._places()):
            sizes["parameters"] += p.numel() * p.element_size()
            if p.grad is not None:
                sizes["gradients"] += p.grad.numel() * p.grad.element_size()
            for key, value in self.state.get(p, {}).items():
                if torch.is_tensor(value):
                    sizes[key] = sizes.get(key, 0) + value.numel() * value.element_size()
        copies = {**self._copies, **dict(self._inside)}.values()
        samples = sum(c.content.numel() * c.content.element_size() for c in copies)
        return {**sizes, "samples": samples + self._record.memory()}

    # The posterior ---------------------------------------------------------------------

    @torch.no_grad()
    def posterior(
        self, named_parameters: Iterable[tuple[str, Tensor]] | None = None
    ) -> DiagGaussian:
        """The current posterior, as copies, over all parameters that have one: those trained
        in some task, or with a given prior.

        :param named_parameters: names to use, for instance ``model.named_parameters()``.
            By default the names that the optimizer was given (pass
            ``model.named_parameters()`` to its constructor), else ``"group.index"``.
        :raises ValueError: for a parameter that is not in the optimizer.
        """
        given = self._names(named_parameters)
        means, precisions, inside = {}, {}, dict(self._inside)
        for _, p, group, _ in self._places():
            value = self._precision(p, group, train=False)
            if p not in given or value is None:
                continue
            mean = inside[p].content if p in inside else p.detach()
            precision = torch.as_tensor(value, dtype=p.dtype, device=p.device)
            means[given[p]] = mean.clone()
            precisions[given[p]] = precision.expand_as(p).clone()
        return DiagGaussian(means, precisions)

    @torch.no_grad()
    def prior(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> DiagGaussian:
        """The prior of the current task, as copies, over all parameters.

        :param named_parameters: see :meth:`posterior`.
        """
        given = self._names(named_parameters)
        means, precisions, inside = {}, {}, dict(self._inside)
        for _, p, group, _ in self._places():
            if p in given:
                mean = inside[p].content if p in inside else p
                state = {**self._first_prior(mean, group), **self.state.get(p, {})}
                means[given[p]] = state["prior_mean"].clone()
                precisions[given[p]] = state["prior_precision"].clone()
        return DiagGaussian(means, precisions)

    def _install_prior(self, prior: DiagGaussian) -> None:
        if any("param_names" not in group for group in self.param_groups):
            raise ValueError(
                "a prior is given by parameter name: construct the optimizer with "
                "model.named_parameters() instead of model.parameters()"
            )
        unknown = set(prior.mean) - {name for name, *_ in self._places()}
        if unknown:
            raise ValueError(f"the prior has parameters that are unknown here: {sorted(unknown)}")
        for name, p, *_ in self._places():
            if name not in prior.mean:
                continue
            if prior.mean[name].shape != p.shape:
                raise ValueError(
                    f"the prior of {name!r} must have shape {tuple(p.shape)}, "
                    f"got {tuple(prior.mean[name].shape)}"
                )
            mean, precision = prior.mean[name], prior.precision[name]
            check_gaussian(name, mean, precision)
            self.state[p] = {
                "prior_mean": empty_beside(p, PRIOR_MEAN_SLOT).copy_(mean),
                "prior_precision": empty_beside(p, PRIOR_PRECISION_SLOT).copy_(precision),
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
        groups = [g for _, p, g, _ in self._places() if p is parameter]
        if not groups:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not in the optimizer"
            )
        group = groups[0]
        fresh = {**self._start_task(parameter, group), **self._first_prior(parameter, group)}
        nothing = torch.zeros_like(parameter)
        state = {
            k: embed(v, fresh.get(k, nothing)) if torch.is_tensor(v) else v
            for k, v in saved.items()
        }
        self.state[parameter] = state

    # torch.optim plumbing --------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            if group["mc_samples"] != self.mc_samples:
                raise ValueError(
                    f"mc_samples must be the same in all groups, got {group['mc_samples']} "
                    f"and {self.mc_samples}"
                )
            seen: set[Tensor] = set()
            for name, p, owner, _ in self._places():
                if owner is group:
                    check_parameter(p, name)
                    if p in seen:  # a tied weight would be exchanged and stepped twice
                        raise ValueError(f"{name!r} is in its group a second time")
                    seen.add(p)
        except Exception:
            self.param_groups.pop()  # refused is as if it had not been added
            raise

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        check_positive("lr", group["lr"], zero=True)
        check_positive("ess", group["ess"])
        check_positive("weight_decay", group["weight_decay"], zero=True)
        check_whole("mc_samples", group["mc_samples"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state. The generator is not part of them: restore it with
        ``optimizer.generator.set_state``, if the noise shall go on as it would have.

        :raises RuntimeError: inside of ``sampled_params()``.
        :raises ValueError: for the state of another optimizer.
        """
        if self._inside:
            raise RuntimeError("load_state_dict() must be called outside of sampled_params()")
        if any(self.own_setting not in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"this is another optimizer's state: its groups have no {self.own_setting}"
            )
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # saved before there was such a setting
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self.discard_samples()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_noise": self._noise}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._copies, self._inside = {}, []
        self.discard_samples()
