"""The state of a training run as plain values, and back into a newly built run.

Pickle is not used, because loading a pickle runs code. ``capture`` walks from the strategy
through its attributes and returns what ``torch.load(weights_only=True)`` accepts: numbers, text,
tensors, and a :class:`Node` for everything else. ``restore`` walks the same way through a strategy
that was newly built from the recipe, and fills in what differs. Functions, loggers and loaders are
not stored: those of the new strategy stay, and a file may name only a few functions, which return
plain values. Objects that only the old strategy had (a replay buffer, an importance) are created
without calling their constructor, if their class belongs to Avalanche or to the parts of this
package that keep values. The data of the benchmark are stored by name.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import io
import random
import re
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks.utils import transform_groups
from avalanche.logging import BaseLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from covon_avalanche.evaluation.memory import TRANSIENT

_PLAIN = (type(None), bool, int, float, str, torch.device, torch.dtype, torch.Size)
# Containers that are filled in place, by the names of their kinds.
_CONTAINERS: dict[str, Any] = {
    cls.__name__: cls for cls in (dict, OrderedDict, defaultdict, list, deque)
}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
# Not stored: those of the newly built run stay.
_NOT_STORED_TYPES = (
    *(BaseLogger, DataLoader, PurePath, types.ModuleType, types.MethodType),
    *(io.IOBase, re.Pattern, type(threading.Lock()), type(threading.RLock())),
)
# Modules whose classes a file may name.
_TRUSTED = (
    *("avalanche.", "torch.utils.data.dataset.", "covon_avalanche.evaluation."),
    *("covon_avalanche.posterior.gaussian.", "covon_avalanche.optim.", "covon_avalanche.plugins."),
    "covon_avalanche.merging.alignment.",
)
_MISSING: Any = object()


class StateError(ValueError):
    """A state that cannot be stored, or does not fit the run it should go into."""


@dataclass(eq=False)
class Node:
    """A value that is more than a number, a text or a tensor."""

    kind: str = ""
    name: Any = ""
    """Name of a class, a function or an object of the benchmark."""
    content: Any = None


def benchmark_data(streams: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of a benchmark's streams, which a run does not change, by name."""
    found: dict[str, Any] = {}
    known: set[int] = set()
    todo = [*streams.items()]
    todo += [(f"{name}.{i}", e) for name, stream in streams.items() for i, e in enumerate(stream)]
    while todo:
        name, value = todo.pop()
        plain = not isinstance(value, list | dict | np.ndarray) and not hasattr(value, "__dict__")
        if plain or id(value) in known:
            continue
        known.add(id(value))
        found[name] = value
        parts: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, list):  # of datasets; not the 60,000 labels
            parts = [(i, child) for i, child in enumerate(value) if hasattr(child, "__dict__")]
        elif not isinstance(value, Tensor | np.ndarray | type | types.FunctionType):
            parts = vars(value).items()
        todo += [(f"{name}.{key}", child) for key, child in parts]
    return found


def _importable(value: Any) -> str:
    """A class or function as ``module:name``."""
    return f"{value.__module__}:{value.__qualname__}"


# All functions that a file may name where the new run does not have the same one.
_KNOWN_FUNCTIONS = {_importable(f): f for f in (torch.zeros, transform_groups.identity)}


def _skipped(value: Any) -> frozenset[str]:
    """Attributes that are not stored; a class names its own in ``not_stored``."""
    default = TRANSIENT if hasattr(value, "plugins") else frozenset[str]()
    return getattr(type(value), "not_stored", default)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _is_plain_object(value: Any) -> bool:
    """Whether all its values are in its ``__dict__``, by how pickle would store it."""
    match value.__reduce_ex__(2):
        case (copyreg.__newobj__, (_,), dict() | None, *items):  # type: ignore[attr-defined]
            return hasattr(value, "__dict__") and not any(items)
    return False


def capture(root: Any, data: Mapping[str, Any]) -> Any:
    """Everything that affects how a run continues.

    :param root: a dictionary with ``"model"`` first, then the strategy that trains it, and
        what else is to be stored.
    :param data: the result of :func:`benchmark_data`.
    :return: a value for ``torch.save``; its tensors share memory with the run's.
    :raises StateError: naming the first attribute that cannot be stored.
    """
    return _Capture(data).encode(root, "run")


class _Capture:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self.names = {id(value): name for name, value in data.items()}
        self._known: dict[int, tuple[Any, Any]] = {}  # the value, whose id stays unique, and how

    def encode(self, value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._known:
            try:
                is_tensor = isinstance(value, Tensor) and id(value) not in self.names
                stored = _without_attributes(value) if is_tensor else Node()
                self._known[id(value)] = value, stored  # before its parts, which may contain it
                if isinstance(stored, Node):
                    stored.kind, stored.name, stored.content = self._describe(value, path)
            except StateError:
                raise
            except Exception as error:  # a plugin may have anything, torch may refuse anything
                raise StateError(f"{path} cannot be stored: {error}") from error
        return self._known[id(value)][1]

    def _describe(self, value: Any, path: str) -> tuple[str, Any, Any]:
        """Kind, name and content of a node."""
        cls, kind = _importable(type(value)), type(value).__name__
        match value:
            case _ if id(value) in self.names:
                return "data", self.names[id(value)], None
            case nn.Module():
                gradients = {name: p.grad for name, p in value.named_parameters()}
                content = {
                    "tensors": self._named(_tensors(value), path),
                    "gradients": self._named(gradients, path),
                    "training": [part.training for part in value.modules()],
                }
                return "module", cls, content
            case Optimizer():
                groups = [self._items(group["params"], path) for group in value.param_groups]
                return "optimizer", cls, [groups, self.encode(value.state_dict(), path)]
            case np.ndarray():
                return "array", "", torch.from_numpy(value)
            case np.generic():
                return "number", "", torch.from_numpy(np.array(value))
            case _ if isinstance(value, _GENERATORS):
                return "generator", "", self.encode(_generator_state(value), f"{path}.state")
            case Enum():
                return "enum", cls, value.name
            case range():
                return "range", "", (value.start, value.stop, value.step)
            case functools.partial():
                parts = value.func, list(value.args), dict(value.keywords)
                return "partial", "", self._items(parts, path)
            case tuple():  # maybe a named one
                return "tuple", "" if type(value) is tuple else cls, self._items(value, path)
            case deque() if type(value) is deque:
                return kind, value.maxlen, self._items(value, path)
            case list() | set() | frozenset() if type(value) in (list, set, frozenset):
                return kind, "", self._items(value, path)
            case dict() if type(value) is _CONTAINERS.get(kind):
                factory = getattr(value, "default_factory", "")
                name = self.encode(factory, f"{path}.default_factory")
                keys = [self.encode(key, f"{path} key") for key in value]
                values = [self.encode(v, f"{path}[{k!r}]") for k, v in value.items()]
                return kind, name, dict(zip(keys, values, strict=True))
            case _ if isinstance(value, _FUNCTIONS):
                return "function", _importable(value), None
            case _ if isinstance(value, _NOT_STORED_TYPES) or type(value) is object:
                return "unchanged", "", None
            case _ if not _is_plain_object(value):
                raise StateError(f"{path} is a {kind}, whose values are not all in its __dict__")
        skipped = _skipped(value)
        kept = {name: child for name, child in vars(value).items() if name not in skipped}
        return "object", cls, self._named(kept, path)

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(value, f"{path}[{i}]") for i, value in enumerate(values)]

    def _named(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: self.encode(value, f"{path}.{name}") for name, value in values.items()}


def _without_attributes(tensor: Tensor) -> Tensor:
    """The same values in the same memory, without hooks and other attributes."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().as_subclass(Tensor).requires_grad_(tensor.requires_grad)


def _generator_state(generator: Any) -> Any:
    """State of a generator of torch, NumPy or Python."""
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(state)
        case _:
            generator.set_state(state)


def restore(state: Any, root: Any, data: Mapping[str, Any]) -> None:
    """Fill a newly built run in place with what ``capture`` returned and ``torch.load`` has read.

    :param root: as for ``capture``; the model's parameters, the optimizer and the plugins stay
        the same objects.
    :param data: that of the new run's benchmark.
    :raises StateError: naming what does not fit. The run may be half filled then.
    """
    _Restore(data).decode(state, root, "run")


class _Restore:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self._made: dict[int, Any] = {}
        self._claimed: set[int] = set()  # what is there already may stand for one node only

    def decode(self, value: Any, there: Any, path: str) -> Any:
        """The value; ``there`` is the new run's value in its place."""
        if isinstance(value, Tensor):
            return self._made.get(id(value), value)
        if not isinstance(value, Node):
            return value
        if id(value) not in self._made:
            if id(there) in self._claimed:
                there = _MISSING
            made = self._make(value, there, path)
            self._made[id(value)] = made
            self._claimed.add(id(made))
        return self._made[id(value)]

    def _make(self, node: Node, there: Any, path: str) -> Any:
        content = node.content
        match node.kind:
            case "data":
                if node.name not in self.data:
                    raise StateError(f"{path}: the benchmark has no {node.name}")
                return self.data[node.name]
            case "unchanged":
                if there is _MISSING:
                    raise StateError(f"{path} cannot be restored")
                return there
            case "function":
                return self._function(node.name, there, path)
            case "partial":  # of known functions only: others could do harm with other arguments
                known = self._function(getattr(content[0], "name", ""), _MISSING, path)
                arguments, keywords = (self.decode(part, _MISSING, path) for part in content[1:])
                return functools.partial(known, *arguments, **keywords)
            case "array":
                return content.numpy()
            case "number":
                return content.numpy()[()]
            case "range":
                return range(*content)
            case "generator":
                if not isinstance(there, _GENERATORS):
                    raise StateError(f"{path}: the new run has no such generator")
                _set_generator_state(there, self.decode(content, _MISSING, path))
                return there
            case "enum":
                return self._class(node.name, there, path, Enum)[content]
            case "set" | "frozenset":
                items = {self.decode(item, _MISSING, path) for item in content}
                return items if node.kind == "set" else frozenset(items)
            case "tuple":
                cls = self._class(node.name, there, path, tuple) if node.name else tuple
                before = there if isinstance(there, tuple) else ()
                return tuple.__new__(cls, self._items(content, before, path))
            case "module":
                return self._module(node, there, path)
            case "optimizer":
                return self._optimizer(node, there, path)
            case "object":
                return self._object(node, there, path)
            case kind if kind in _CONTAINERS:
                return self._container(node, there, path)
        raise StateError(f"{path}: unknown kind of value {node.kind!r}")

    def _function(self, name: str, there: Any, path: str) -> Any:
        if isinstance(there, _FUNCTIONS) and _importable(there) == name:
            return there
        if name not in _KNOWN_FUNCTIONS:
            raise StateError(f"{path}: {name} must not be created from a file")
        return _KNOWN_FUNCTIONS[name]

    def _class(self, name: str, there: Any, path: str, kind: type = object) -> Any:
        """The class of ``there``, or a trusted one that its module defines, not only imports."""
        found: Any = type(there)
        if there is _MISSING or _importable(found) != name:
            module, _, qualname = name.partition(":")
            if not f"{module}.".startswith(_TRUSTED):
                raise StateError(f"{path}: {name} must not be created from a file")
            found = sys.modules.get(module)
            for part in qualname.split("."):
                found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, kind) and _importable(found) == name):
            raise StateError(f"{path}: {name} must not be created from a file")
        return found

    def _items(self, content: list[Any], before: Iterable[Any], path: str) -> Iterator[Any]:
        there = dict(enumerate(before))
        for i, item in enumerate(content):
            yield self.decode(item, there.get(i, _MISSING), f"{path}[{i}]")

    def _container(self, node: Node, there: Any, path: str) -> Any:
        made: Any = there
        if type(there) is not _CONTAINERS[node.kind]:
            made = _CONTAINERS[node.kind]()
            if node.kind == "deque":
                made = deque(maxlen=node.name)
            elif node.kind == "defaultdict":
                made.default_factory = self.decode(node.name, _MISSING, f"{path}.default_factory")
        self._made[id(node)] = made
        before = made.copy()
        made.clear()
        if isinstance(made, dict):
            for k, v in node.content.items():
                key = self.decode(k, _MISSING, f"{path} key")
                made[key] = self.decode(v, before.get(key, _MISSING), f"{path}[{key!r}]")
        else:
            made.extend(self._items(node.content, before, path))
        return made

    def _object(self, node: Node, there: Any, path: str) -> Any:
        cls = self._class(node.name, there, path)
        if type(there) is not cls:
            there = cls.__new__(cls)
        self._made[id(node)] = there
        self._claimed.add(id(there))
        attributes, before = vars(there), dict(vars(there))
        skipped = _skipped(there)
        for name in before:
            if name not in node.content and name not in skipped:
                del attributes[name]
        for name, value in node.content.items():
            attributes[name] = self.decode(value, before.get(name, _MISSING), f"{path}.{name}")
        return there

    def _module(self, node: Node, there: Any, path: str) -> nn.Module:
        if not isinstance(there, nn.Module) or _importable(type(there)) != node.name:
            alike = [m for m in self._made.values() if isinstance(m, nn.Module)]
            alike = [m for m in alike if _importable(type(m)) == node.name]
            if not alike:
                raise StateError(f"{path}: {node.name} cannot be created again")
            there = copy.deepcopy(alike[0])  # a method's copy of the model
        tensors, stored = _tensors(there), node.content["tensors"]
        shapes = [{name: t.shape for name, t in part.items()} for part in (tensors, stored)]
        if different := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
            raise StateError(f"{path} is another model: it differs in {', '.join(different[:5])}")
        for name, tensor in tensors.items():
            tensor.data = stored[name].data  # whose memory others may share
            tensor.requires_grad_(stored[name].requires_grad)
            self._made[id(stored[name])] = tensor  # who refers to it later means the module's
        for name, p in there.named_parameters():
            p.grad = node.content["gradients"][name]
        for part, training in zip(there.modules(), node.content["training"], strict=True):
            part.training = training
        return there

    def _optimizer(self, node: Node, there: Any, path: str) -> Optimizer:
        if not isinstance(there, Optimizer) or _importable(type(there)) != node.name:
            raise StateError(f"{path} is not a {node.name}")
        groups, state = node.content
        there.param_groups[:] = [  # Avalanche puts all into one at the first train
            {"params": [self.decode(p, _MISSING, path) for p in group]} for group in groups
        ]
        there.load_state_dict(self.decode(state, _MISSING, path))
        return there
