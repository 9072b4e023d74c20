"""From the objects of a run to JSON and tensors."""

from __future__ import annotations

import functools
import io
import random
import re
import threading
import types
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from avalanche.logging import BaseLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from covon_avalanche.experiment.state.common import (
    FUNCTIONS,
    ExternalObjects,
    State,
    StateError,
    generator_state,
    importable,
    skipped_attributes,
)

# Owned by whoever built the strategy; nothing of them changes in training that decides a result.
_STAY = (
    *(BaseLogger, DataLoader, io.IOBase, PurePath, re.Pattern, np.ufunc),
    *(types.ModuleType, types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(type(threading.Lock()), type(threading.RLock()), torch.memory_format, torch.layout),
)


def capture(root: Any, external: ExternalObjects) -> tuple[State, dict[str, Tensor]]:
    """All that decides how a run continues.

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
            case np.random.Generator() | np.random.RandomState() | random.Random():
                own = generator_state(value)
                return {"is": "other generator", "state": self.encode(own, f"{path}.state")}
            case functools.partial():
                parts = [value.func, list(value.args), dict(value.keywords)]
                return {"is": "partial", "parts": [self.encode(part, path) for part in parts]}
            case Enum():
                return {"is": "enum", "class": importable(type(value)), "name": value.name}
            case str() | int() | float():
                raise StateError(f"{path} is a {type(value).__name__}")
            case torch.device() | torch.dtype():
                return {"is": type(value).__name__, "name": str(value).removeprefix("torch.")}
            case bytes():
                return {"is": "bytes", "hex": value.hex()}
            case range() | slice():
                ends = [value.start, value.stop, value.step]
                return {"is": type(value).__name__, "items": ends}
            case dict():
                return self._dict(value, path)
            case list() | tuple() | set() | frozenset() | deque():
                return self._sequence(value, path)
            case _ if isinstance(value, FUNCTIONS):
                return {"is": "function", "name": importable(value)}
            case _ if isinstance(value, _STAY):
                return {"is": "the same"}
            case _ if hasattr(value, "__next__"):
                raise StateError(f"{path} is in the middle of an iteration")
        return self._object(value, path)

    def _view(self, tensor: Tensor) -> State:
        """Where a tensor's values are: tensors that share memory will share it again."""
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
        if type(value) is object:  # a sentinel
            return {"is": "the same"}
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
