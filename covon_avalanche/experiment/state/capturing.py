"""From the objects of a run to JSON and tensors."""

from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from avalanche.logging import BaseLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

State = dict[str, Any]
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
OF_TORCH = ("zeros", "ones", "empty", "zeros_like", "ones_like")
# Attributes of a strategy that are set again before they are used.
_SKIPPED = frozenset(
    ("experience", "dataloader", "adapted_dataset", "mbatch", "mb_output", "loss")
    + ("current_eval_stream", "_eval_streams", "_example_cache", "checkpointer")
)
# Not stored: those of the newly built run stay.
_NOT_STORED_TYPES = (BaseLogger, DataLoader, PurePath, types.ModuleType, types.MethodType)


class StateError(ValueError):
    """A state that cannot be stored, or does not fit the run it should go into."""


class ExternalObjects:
    """Objects that the run is given and does not change, by name: the benchmark's data."""

    def __init__(self, streams: Mapping[str, Any]) -> None:
        self.objects: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        for name, stream in streams.items():
            for i, experience in enumerate(stream):
                self._add(f"{name}.{i}", experience)
            self._add(name, stream)

    def _add(self, name: str, value: Any) -> None:
        todo = [(name, value)]
        while todo:
            name, value = todo.pop()
            if id(value) in self.names or not _is_addressable(value):
                continue
            self.names[id(value)], self.objects[name] = name, value
            todo += [(f"{name}.{key}", child) for key, child in _parts(value)]


def _is_addressable(value: Any) -> bool:
    return isinstance(value, list | dict | Tensor | np.ndarray) or hasattr(value, "__dict__")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | np.ndarray | type | types.FunctionType):
        return iter(())
    if isinstance(value, list):  # of datasets; not the 60,000 labels
        return ((str(i), child) for i, child in enumerate(value) if hasattr(child, "__dict__"))
    if isinstance(value, dict):
        return ((str(key), child) for key, child in value.items())
    return iter(vars(value).items())


def skipped_attributes(value: Any) -> frozenset[str]:
    """Attributes that are not stored; a class names its own in ``not_stored``."""
    default = _SKIPPED if hasattr(value, "plugins") else frozenset[str]()
    return getattr(type(value), "not_stored", default)


def importable(value: Any) -> str:
    """A class or function as ``module:name``."""
    name = getattr(value, "__name__", "")
    if name in OF_TORCH and getattr(torch, name) is value:
        return f"torch:{name}"
    return f"{value.__module__}:{value.__qualname__}"


def capture(root: Any, external: ExternalObjects) -> tuple[State, dict[str, Tensor]]:
    """Everything that affects how a run continues.

    :param root: a dictionary with ``"model"`` first, then the strategy that trains it, and
        what else is to be stored.
    :return: JSON-compatible state, and the tensors it refers to.
    :raises StateError: naming the first attribute that cannot be stored.
    """
    capturing = _Capture(external)
    value = capturing.encode(root, "run")
    return {"root": value, "nodes": capturing.nodes}, capturing.tensors


class _Capture:
    def __init__(self, external: ExternalObjects) -> None:
        self.external = external
        self.nodes: list[State] = []
        self.tensors: dict[str, Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], str] = {}
        self._known: dict[int, int] = {}
        self._alive: list[Any] = []  # so that ids stay unique

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, str, int, float, np.str_):
            return value
        if id(value) not in self._known:
            number = self._number(value)
            try:
                self.nodes[number] = self._node(value, path)
            except StateError:
                raise
            except Exception as error:  # a plugin may have anything, torch may refuse anything
                raise StateError(f"{path} cannot be stored: {error}") from error
        return {"#": self._known[id(value)]}

    def _number(self, value: Any) -> int:
        self._known[id(value)] = len(self.nodes)
        self._alive.append(value)
        self.nodes.append({})
        return len(self.nodes) - 1

    def _node(self, value: Any, path: str) -> State:
        if id(value) in self.external.names:
            return {"is": "data", "name": self.external.names[id(value)]}
        match value:
            case nn.Module():
                return self._module(value)
            case Optimizer():
                return self._optimizer(value, path)
            case Tensor():
                parameter = isinstance(value, nn.Parameter)
                needs = {"requires_grad": value.requires_grad, "parameter": parameter}
                return {"is": "tensor", **needs, **self._view(value)}
            case np.ndarray():
                return {"is": "array", **self._view(torch.from_numpy(value.copy()))}
            case np.generic():
                return self._node(np.asarray(value), path) | {"is": "number"}
            case torch.Generator():
                return {"is": "generator", **self._view(value.get_state())}
            case functools.partial():
                parts = [value.func, list(value.args), dict(value.keywords)]
                return {"is": "partial", "parts": [self.encode(part, path) for part in parts]}
            case str() | int() | float() | Enum() | random.Random():  # more than in their __dict__
                raise StateError(f"{path} is a {type(value).__name__}")
            case torch.device():
                return {"is": "device", "name": str(value)}
            case range():
                return {"is": "range", "items": [value.start, value.stop, value.step]}
            case dict():
                return self._dict(value, path)
            case list() | tuple() | set() | deque():
                return self._sequence(value, path)
            case _ if isinstance(value, FUNCTIONS):
                return {"is": "function", "name": importable(value)}
            case _ if isinstance(value, _NOT_STORED_TYPES) or type(value) is object:
                return {"is": "unchanged"}
            case _ if hasattr(value, "__next__"):
                raise StateError(f"{path} is in the middle of an iteration")
        return self._object(value, path)

    def _view(self, tensor: Tensor) -> State:
        """The location of a tensor's values: tensors that share memory will share it again."""
        if tensor.is_complex() or tensor.is_quantized:
            raise TypeError(f"{tensor.dtype} has no place in the file")
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        key = (storage.data_ptr() or id(storage), tensor.dtype)
        if key not in self._storages:
            name = self._storages[key] = f"t{len(self.tensors)}"
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self.tensors[name] = whole.to("cpu", copy=True)
            self._alive.append(storage)
        return {
            "tensor": self._storages[key],
            "size": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "device": str(tensor.device),
        }

    def _dict(self, value: dict, path: str) -> State:
        if type(value) not in (dict, OrderedDict, defaultdict):
            raise StateError(f"{path} is a {type(value).__name__}")
        node: State = {"is": type(value).__name__}
        if isinstance(value, defaultdict):
            node["factory"] = self.encode(value.default_factory, f"{path}.default_factory")
        node["items"] = [
            [self.encode(k, f"{path} key"), self.encode(v, f"{path}[{k!r}]")]
            for k, v in value.items()
        ]
        return node

    def _sequence(self, value: Any, path: str) -> State:
        items = [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        node: State = {"is": type(value).__name__, "items": items}
        if isinstance(value, deque):
            node["maxlen"] = value.maxlen
        if isinstance(value, tuple) and type(value) is not tuple:  # a named one, or torch.Size
            node |= {"is": "tuple", "class": importable(type(value))}
        return node

    def _object(self, value: Any, path: str) -> State:
        attributes = getattr(value, "__dict__", None)
        if attributes is None or _slots(value):
            raise StateError(
                f"{path} is a {type(value).__name__}, whose values are not all in its __dict__"
            )
        skipped = skipped_attributes(value)
        state = {
            name: self.encode(child, f"{path}.{name}")
            for name, child in attributes.items()
            if name not in skipped
        }
        return {"is": "object", "class": importable(type(value)), "attributes": state}

    def _module(self, module: nn.Module) -> State:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():  # who refers to them later means the module's
            if id(tensor) not in self._known:
                number = self._number(tensor)
                self.nodes[number] = {"is": "part", "of": self._known[id(module)], "name": name}
        return {
            "is": "module",
            "class": importable(type(module)),
            "tensors": {name: self._view(tensor) for name, tensor in tensors.items()},
            "gradients": {
                n: self._view(p.grad) for n, p in module.named_parameters() if p.grad is not None
            },
            "requires_grad": {n: p.requires_grad for n, p in module.named_parameters()},
            "training": {name: part.training for name, part in module.named_modules()},
        }

    def _optimizer(self, optimizer: Optimizer, path: str) -> State:
        groups = [
            {key: self.encode(value, f"{path}.{key}") for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [
            self.encode(dict(optimizer.state.get(p, {})), f"{path}.state[{i}]")
            for i, p in enumerate(parameters)
        ]
        node: State = {"is": "optimizer", "class": importable(type(optimizer))}
        node |= {"groups": groups, "state": state}
        return node


def _slots(value: Any) -> list[str]:
    """Names of the slots that hold a value."""
    return [
        name
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    ]
