"""Optimizers that know their parameters by name, and to which weights a saved state belongs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from covon_avalanche.float64 import exact_sum
from covon_avalanche.optim.checks import check_names, check_state
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.named_params import NamedParam
from covon_avalanche.optim.param_groups import in_other_order, match_groups, squares_in_order
from covon_avalanche.optim.samples import align_state_
from covon_avalanche.optim.sharding import is_sharded

Group = dict[str, Any]
State = dict[str, Any]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's wrapper; any other as it is."""
    return getattr(optimizer, "optimizer", optimizer)


class NamedOptimizer(Optimizer, ABC):
    """Base of :class:`PosteriorOptimizer`: names of parameters, checks of groups, and
    ``state_dict``, which is loaded as a whole or not at all.

    A loaded state is matched by name, or by position where parameters have no names, and compared
    with the weights that it was saved with: ``saved_squares`` in each group are their sums of
    squares, ``saved_entries`` the number of parameters that have each entry.
    """

    own_setting: ClassVar[str]
    """A setting that no other optimizer has, which identifies the optimizer that wrote a
    ``state_dict``."""

    former_defaults: ClassVar[Group] = {}
    """Settings of states saved before they existed, where they differ from ``defaults``."""

    def __init__(self, params: Any, defaults: Group) -> None:
        self._names = WeakTensorKeyDictionary()  # where parameters were taken out of a group
        self._forget_params()
        super().__init__(params, {**defaults, "saved_entries": None, "saved_squares": None})

    def _forget_params(self) -> None:
        """Set what neither copies nor states contain."""
        self._params: list[NamedParam] = []  # for the groups, parameters and names in _places
        self._places: list[Any] = []
        self._loaded_squares: list[float] | None = None
        """With a state and no sample drawn since: of the weights that it was saved with."""

    # What an optimizer defines ---------------------------------------------------------

    @abstractmethod
    def mean_of(self, p: Tensor) -> Tensor:
        """The value of a parameter that its state belongs to; not a copy."""

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""

    @abstractmethod
    def _check_params(self, added: list[NamedParam]) -> None:
        """Raise a ``ValueError`` naming a parameter, of a group just added, that is not allowed."""

    @abstractmethod
    def _state_needs(self, group: Group) -> dict[str, set[str]]:
        """For each entry of a parameter's state, the entries that it requires."""

    # Parameters ------------------------------------------------------------------------

    def _named_params(self) -> list[NamedParam]:
        """All parameters, with the names that the optimizer was constructed with
        (``model.named_parameters()``), else ``"group.index"``."""
        places = [
            item
            for group in self.param_groups
            for item in (group, *group["params"], *group.get("param_names", ()))
        ]
        if len(places) != len(self._places) or not all(map(is_, places, self._places)):
            self._params, self._places = self._list_params(), places
        return self._params

    def _list_params(self) -> list[NamedParam]:
        known = {named.param: named for named in self._params}
        found: list[NamedParam] = []
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names", ())
            is_named = len(names) == len(group["params"])
            for j, p in enumerate(group["params"]):
                name = names[j] if is_named else self._names.get(p, f"{i}.{j}")
                named = known.get(p) or NamedParam(name, p, group, len(found))
                named.name, named.group, named.number = name, group, len(found)
                found.append(named)
        return found

    def _renamed(self, given: Iterable[tuple[str, Tensor]] | None) -> list[NamedParam]:
        """The given parameters with these names, or all with their own."""
        if given is None:
            return self._named_params()
        names = {p: name for name, p in given}
        renamed = [
            NamedParam(names.pop(n.param), n.param, n.group, n.number)
            for n in self._named_params()
            if n.param in names
        ]
        if names:
            raise ValueError(f"these parameters are not in the optimizer: {sorted(names.values())}")
        return renamed

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._names.update(zip(group["params"], group.get("param_names", ()), strict=False))
        try:
            self.check_group(group)
            self._check_params([n for n in self._named_params() if n.group is group])
            check_names(named.name for named in self._named_params())
        except Exception:
            self.param_groups.pop()
            raise

    # States ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups and state, and which weights they belong to."""
        packed = super().state_dict()
        entries = json.dumps(self._entries(), sort_keys=True)
        squares = self._squares()
        for group in packed["param_groups"]:  # strings, because lists are loaded one by one
            group["saved_entries"] = entries
            group["saved_squares"] = json.dumps(squares)
        return packed

    def _squares(self) -> list[float] | None:
        """The sum of each parameter's squared weights, 0 for those that were never trained; unknown
        if some are sharded or have no values yet."""
        params = [named.param for named in self._named_params()]
        trained = [p for p in params if p.requires_grad or self.state.get(p)]
        if any(is_sharded(p) or p.is_meta or is_lazy(p) for p in trained):
            return None
        weights = {p: self.mean_of(p) for p in trained}
        squares = [exact_sum(w.square()) for w in weights.values()]
        values = torch.stack([s.to(squares[0].device) for s in squares]).tolist() if squares else []
        found = dict(zip(weights, values, strict=True))
        return [found.get(p, 0.0) for p in params]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state.

        :raises ValueError: for the state of another optimizer, one of parameters with other names,
            or one that is damaged, naming the parameter; nothing is changed then.
        """
        if any(self.own_setting not in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"this is another optimizer's state: its groups have no {self.own_setting}"
            )
        saved = match_groups(state_dict["param_groups"], self.param_groups)
        groups = [{**self.defaults, **self.former_defaults, **group} for group in saved]
        before = dict(vars(self))
        with defer_interrupt():
            try:
                super().load_state_dict({**state_dict, "param_groups": groups})
                self._keep_dtypes(state_dict["state"], groups)
                self._loaded_squares = squares_in_order(groups)
                expected = json.loads(self.param_groups[0]["saved_entries"] or "{}")
                for state in self.state.values() if expected else ():
                    # torch.distributed.checkpoint leaves what this optimizer had before
                    for entry in state.keys() - expected.keys():
                        del state[entry]
                for group in self.param_groups:
                    self.check_group(group)
                for named in self._named_params():
                    p, state = named.param, self.state.get(named.param, {})
                    check_state(named.name, p, state, self._state_needs(named.group))
                    align_state_(state, p, named.name)
                found = self._entries()
                for entry, count in expected.items():
                    if found[entry] != count:
                        raise ValueError(
                            f"{entry} was saved for {count} parameters, but the loaded state has "
                            f"it for {found[entry]}: with torch.distributed.checkpoint, call "
                            "allocate_state() before get_optimizer_state_dict() and load()"
                        )
            except BaseException:
                vars(self).update(before)
                raise

    def _entries(self) -> Counter[str]:
        """For how many parameters there is each entry of the state."""
        return Counter(entry for state in self.state.values() for entry in state)

    def _keep_dtypes(self, saved: dict[Any, State], groups: list[Group]) -> None:
        """Undo that torch casts a loaded state to the dtype of the weights."""
        numbers = (number for group in groups for number in group["params"])
        for number, named in zip(numbers, self._named_params(), strict=True):
            if number in saved:
                self.state[named.param] = {
                    key: value.to(named.param.device) if torch.is_tensor(value) else value
                    for key, value in saved[number].items()
                }

    def rewind(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each parameter, and keep the present settings and counters: for
        weights from earlier in this task.

        :param state_dict: saved with those weights.
        :raises ValueError: as :meth:`load_state_dict`.
        """
        first = state_dict["param_groups"][0]
        saved = {key: first.get(key) for key in ("saved_entries", "saved_squares")}
        groups = [{**group, **saved} for group in self.state_dict()["param_groups"]]
        self.load_state_dict({**state_dict, "param_groups": groups})

    def _match_loaded(self) -> None:
        """After a state was loaded, compare it with the weights. Raise an error if they are those
        it was saved with, but in another order, as can happen where it is matched by position, or,
        within a task, others."""
        if self._loaded_squares is None:
            return
        own = self._squares()
        if own and in_other_order(self._loaded_squares, own):
            raise ValueError(
                "the loaded state was saved with these weights in another order: construct the "
                "optimizer with model.named_parameters(), before saving, too, so that it is "
                "matched by name"
            )
        # groups may have been added since
        both = zip(self._named_params(), self._loaded_squares, own or (), strict=False)
        for named, was, now in both:
            p = named.param
            in_task = "step" in self.state.get(p, {}) and p.dtype != torch.bfloat16
            if in_task and abs(now - was) > 1e-5 * was:  # devices round differently
                raise RuntimeError(
                    f"{named.name!r} is not the weight that the loaded state, of a task not yet "
                    "consolidated, was saved with: load the model's weights of that moment, too; "
                    "optimizer.load_state_dict(optimizer.state_dict()) keeps those it has now"
                )
        self._loaded_squares = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_names"):  # of a copy, not while a state is loaded
            self._names = WeakTensorKeyDictionary()
        self._forget_params()
