"""The state of a training run as JSON and tensors, and back into a run built anew.

Pickle is not used, because loading a pickle runs code. ``capture`` walks from the strategy
through its attributes; ``restore`` walks the same way through a strategy that was built anew
from the recipe, and fills in what differs. So functions, loggers and loaders need not be stored:
those of the new strategy stay, and a file names no others than a few that make nothing but
values. Objects that only the old one had (a replay buffer, an importance) are made without
calling their constructor, if their class belongs to Avalanche or to the parts of this package
that keep values. The data of the benchmark is named, not stored.
"""

from __future__ import annotations

import copy
import functools
import io
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks.utils import transform_groups
from avalanche.logging import BaseLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from covon_avalanche.optim import PosteriorOptimizer

State = dict[str, Any]
# Where classes are defined of which a file may ask for an object.
_TRUSTED = (
    *("avalanche.", "torch.utils.data.", "covon_avalanche.evaluation."),
    *("covon_avalanche.gaussian.", "covon_avalanche.optim.", "covon_avalanche.plugins."),
)
_OF_TORCH = ("zeros", "ones", "empty", "zeros_like", "ones_like")
# All functions that a file may ask for where the new run does not have the same one.
_KNOWN_FUNCTIONS = {f"torch:{name}": getattr(torch, name) for name in _OF_TORCH} | {
    "avalanche.benchmarks.utils.transform_groups:identity": transform_groups.identity
}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
# Owned by whoever built the strategy; nothing of them changes in training that decides a result.
_STAY = (BaseLogger, DataLoader, io.IOBase, types.ModuleType, types.MethodType)
# Attributes of a strategy that are made anew before they are used again.
_PASSING = frozenset(
    ("experience", "dataloader", "adapted_dataset", "mbatch", "mb_output", "loss")
    + ("current_eval_stream", "_eval_streams", "_fetched_examples", "checkpoints")
)
_NONE: frozenset[str] = frozenset()
_MISSING: Any = object()


class StateError(ValueError):
    """A state that cannot be stored, or does not fit the run it should go into."""


class Surroundings:
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
            if id(value) in self.names or not _is_thing(value):
                continue
            self.names[id(value)], self.objects[name] = name, value
            todo += [(f"{name}.{key}", child) for key, child in _parts(value)]


def _is_thing(value: Any) -> bool:
    return isinstance(value, list | dict | Tensor | np.ndarray) or hasattr(value, "__dict__")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | np.ndarray | type | types.FunctionType):
        return iter(())
    if isinstance(value, list):  # of datasets; not the 60,000 labels
        return ((str(i), child) for i, child in enumerate(value) if hasattr(child, "__dict__"))
    if isinstance(value, dict):
        return ((str(key), child) for key, child in value.items())
    return iter(vars(value).items())


# Capture --------------------------------------------------------------------------------


def capture(root: Any, surroundings: Surroundings) -> tuple[State, dict[str, Tensor]]:
    """All that decides how a run goes on.

    :param root: a dictionary with ``"model"`` first, then the strategy that trains it, and
        what else is to be stored.
    :return: JSON-compatible state, and the tensors it refers to.
    :raises StateError: naming the first attribute that cannot be stored.
    """
    capturing = _Capture(surroundings)
    value = capturing.encode(root, "run")
    return {"root": value, "nodes": capturing.nodes}, capturing.tensors


class _Capture:
    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
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
        if id(value) in self.surroundings.names:
            return {"is": "data", "name": self.surroundings.names[id(value)]}
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
            case Enum():
                return {"is": "enum", "class": _importable(type(value)), "name": value.name}
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
            case _ if isinstance(value, _FUNCTIONS):
                return {"is": "function", "name": _importable(value)}
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
            node |= {"is": "tuple", "class": _importable(type(value))}
        return node

    def _object(self, value: Any, path: str) -> State:
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            return {"is": "the same"}
        passing = _passing(value)
        state = {
            name: self.encode(child, f"{path}.{name}")
            for name, child in attributes.items()
            if name not in passing
        }
        return {"is": "object", "class": _importable(type(value)), "attributes": state}

    def _module(self, module: nn.Module) -> State:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():  # who refers to them later means the module's
            if id(tensor) not in self._known:
                number = self._number(tensor)
                self.nodes[number] = {"is": "part", "of": self._known[id(module)], "name": name}
        return {
            "is": "module",
            "class": _importable(type(module)),
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
        node: State = {"is": "optimizer", "class": _importable(type(optimizer))}
        node |= {"groups": groups, "state": state}
        if isinstance(optimizer, PosteriorOptimizer):
            node["noise"] = self.encode(optimizer.generator, f"{path}.generator")
        return node


def _passing(value: Any) -> frozenset[str]:
    """Attributes that are not stored; a class names its own in ``not_stored``."""
    return getattr(type(value), "not_stored", _PASSING if hasattr(value, "plugins") else _NONE)


def _importable(value: Any) -> str:
    name = getattr(value, "__name__", "")
    if name in _OF_TORCH and getattr(torch, name) is value:
        return f"torch:{name}"
    return f"{value.__module__}:{value.__qualname__}"


# Restore --------------------------------------------------------------------------------


def restore(
    state: State, tensors: Mapping[str, Tensor], root: Any, surroundings: Surroundings
) -> None:
    """Fill a run built anew, in place, with what ``capture`` returned.

    :param root: as for ``capture``; the model's parameters, the optimizer and the plugins stay
        the same objects.
    :raises StateError: naming what does not fit. The run may be half filled then.
    """
    restoring = _Restore(state["nodes"], tensors, surroundings)
    restoring.decode(state["root"], root, "run")


class _Restore:
    def __init__(
        self,
        nodes: list[State],
        tensors: Mapping[str, Tensor],
        surroundings: Surroundings,
    ) -> None:
        self.nodes, self.tensors, self.surroundings = nodes, tensors, surroundings
        self._made: dict[int, Any] = {}
        self._storages: dict[str, Tensor] = {}
        self._claimed: set[int] = set()  # what is there already may stand for one node only

    def decode(self, value: Any, there: Any, path: str) -> Any:
        """The value; ``there`` is what the new run has in its place."""
        if not isinstance(value, dict):
            return value
        number = value["#"]
        if number not in self._made:
            if id(there) in self._claimed:
                there = _MISSING
            made = self._make(number, self.nodes[number], there, path)
            self._made[number] = made
            self._claimed.add(id(made))
        return self._made[number]

    def _make(self, number: int, node: State, there: Any, path: str) -> Any:
        match node["is"]:
            case "data":
                if node["name"] not in self.surroundings.objects:
                    raise StateError(f"{path}: the benchmark has no {node['name']}")
                return self.surroundings.objects[node["name"]]
            case "the same":
                if there is _MISSING:
                    raise StateError(f"{path} cannot be restored")
                return there
            case "function":
                return self._function(node["name"], there, path)
            case "tensor":
                return self._tensor(node)
            case "part":
                if node["of"] not in self._made:
                    raise StateError(f"{path} belongs to a model that is not stored before it")
                owner = self._made[node["of"]]
                return {**dict(owner.named_parameters()), **dict(owner.named_buffers())}[
                    node["name"]
                ]
            case "enum":
                return self._class(node["class"], there, path, Enum)[node["name"]]
            case "array":
                return self._view(node).numpy()
            case "number":
                return self._view(node).numpy()[()]
            case "partial":
                return self._partial(node, path)
            case "generator":
                made = there if isinstance(there, torch.Generator) else torch.Generator()
                made.set_state(self._view(node))
                return made
            case "device":
                return torch.device(node["name"])
            case "dtype":
                dtype = getattr(torch, node["name"], None)
                if not isinstance(dtype, torch.dtype):
                    raise StateError(f"{path}: there is no torch.{node['name']}")
                return dtype
            case "bytes":
                return bytes.fromhex(node["hex"])
            case "range" | "slice":
                return (range if node["is"] == "range" else slice)(*node["items"])
            case "dict" | "OrderedDict" | "defaultdict":
                return self._dict(number, node, there, path)
            case "list" | "deque" | "tuple" | "set" | "frozenset":
                return self._sequence(number, node, there, path)
            case "module":
                return self._module(node, there, path)
            case "optimizer":
                return self._optimizer(node, there, path)
            case "object":
                return self._object(number, node, there, path)
        raise StateError(f"{path}: unknown kind of value {node['is']!r}")

    def _view(self, node: State) -> Tensor:
        name = node["tensor"]
        if name not in self._storages:
            self._storages[name] = self.tensors[name].to(node["device"], copy=True)
        return self._storages[name].as_strided(node["size"], node["stride"], node["offset"])

    def _function(self, name: str, there: Any, path: str) -> Any:
        if isinstance(there, _FUNCTIONS) and _importable(there) == name:
            return there
        if name not in _KNOWN_FUNCTIONS:
            raise StateError(f"{path}: a {name} is not made from a file")
        return _KNOWN_FUNCTIONS[name]

    def _partial(self, node: State, path: str) -> functools.partial:
        """Of known functions only: with other arguments any function of the run is another."""
        function, arguments, keywords = node["parts"]
        known = self._function(self.nodes[function["#"]].get("name", ""), _MISSING, path)
        arguments = self.decode(arguments, _MISSING, path)
        return functools.partial(known, *arguments, **self.decode(keywords, _MISSING, path))

    def _class(self, name: str, there: Any, path: str, kind: type = object) -> Any:
        """That of what is there, or one that is defined, not only imported, where the name says."""
        found: Any = type(there)
        if there is _MISSING or _importable(found) != name:
            module, _, qualname = name.partition(":")
            if not f"{module}.".startswith(_TRUSTED):
                raise StateError(f"{path}: a {name} is not made from a file")
            found = sys.modules.get(module)
            for part in qualname.split("."):
                found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, kind) and _importable(found) == name):
            raise StateError(f"{path}: a {name} is not made from a file")
        return found

    def _tensor(self, node: State) -> Tensor:
        stored = self._view(node)
        if node["parameter"]:
            return nn.Parameter(stored, node["requires_grad"])
        return stored.requires_grad_(node["requires_grad"])

    def _dict(self, number: int, node: State, there: Any, path: str) -> dict:
        made: dict
        if type(there).__name__ == node["is"]:
            made = there
        elif node["is"] == "defaultdict":
            made = defaultdict(self.decode(node["factory"], _MISSING, f"{path}.default_factory"))
        else:
            made = OrderedDict() if node["is"] == "OrderedDict" else {}
        self._made[number] = made
        before = dict(made)
        made.clear()
        for k, v in node["items"]:
            key = self.decode(k, _MISSING, f"{path} key")
            made[key] = self.decode(v, before.get(key, _MISSING), f"{path}[{key!r}]")
        return made

    def _sequence(self, number: int, node: State, there: Any, path: str) -> Any:
        before = list(there) if isinstance(there, list | tuple | deque) else []
        before += [_MISSING] * (len(node["items"]) - len(before))
        made: Any = []
        if node["is"] in ("list", "deque"):
            if type(there).__name__ == node["is"]:
                made = there
            elif node["is"] == "deque":
                made = deque(maxlen=node["maxlen"])
            made.clear()
            self._made[number] = made
        for i, item in enumerate(node["items"]):
            made.append(self.decode(item, before[i], f"{path}[{i}]"))
        if "class" in node:
            if node["class"] == "torch:Size":
                return torch.Size(made)
            return tuple.__new__(self._class(node["class"], there, path, tuple), made)
        kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[node["is"]](made) if node["is"] in kinds else made

    def _object(self, number: int, node: State, there: Any, path: str) -> Any:
        cls = self._class(node["class"], there, path)
        if type(there) is not cls:
            there = cls.__new__(cls)
        self._made[number] = there
        self._claimed.add(id(there))
        attributes, before = vars(there), dict(vars(there))
        passing = _passing(there)
        for name in before:
            if name not in node["attributes"] and name not in passing:
                del attributes[name]
        for name, value in node["attributes"].items():
            old = before.get(name, _MISSING)
            attributes[name] = self.decode(value, old, f"{path}.{name}")
        return there

    def _module(self, node: State, there: Any, path: str) -> nn.Module:
        if not isinstance(there, nn.Module) or _importable(type(there)) != node["class"]:
            alike = [m for m in self._made.values() if isinstance(m, nn.Module)]
            alike = [m for m in alike if _importable(type(m)) == node["class"]]
            if not alike:
                raise StateError(f"{path}: a {node['class']} cannot be made anew")
            there = copy.deepcopy(alike[0])  # a method's copy of the model
        tensors = {**dict(there.named_parameters()), **dict(there.named_buffers())}
        if tensors.keys() != node["tensors"].keys():
            names = sorted(tensors.keys() ^ node["tensors"].keys())
            raise StateError(f"{path} is another model: it differs in {', '.join(names[:5])}")
        for name, tensor in tensors.items():
            self._fill(tensor, node["tensors"][name], f"{path}: {name}")
        gradients = node["gradients"]
        for name, p in there.named_parameters():
            p.grad = self._view(gradients[name]) if name in gradients else None
        for name, p in there.named_parameters():
            p.requires_grad_(node["requires_grad"][name])
        for name, part in there.named_modules():
            part.training = node["training"][name]
        return there

    def _fill(self, tensor: Tensor, node: State, path: str) -> None:
        """Put stored values into a model's tensor; what shares its memory is to share it again."""
        stored = self._view(node)
        if stored.shape != tensor.shape:
            raise StateError(
                f"{path} is {list(tensor.shape)}, but {list(stored.shape)} is stored: this is "
                "another model"
            )
        with torch.no_grad():
            tensor.copy_(stored)
        storage = tensor.detach().untyped_storage()
        if storage.nbytes() == self._storages[node["tensor"]].nbytes:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._storages[node["tensor"]] = whole.set_(storage)

    def _optimizer(self, node: State, there: Any, path: str) -> Optimizer:
        if not isinstance(there, Optimizer) or _importable(type(there)) != node["class"]:
            raise StateError(f"{path} is not a {node['class']}")
        groups = [
            {key: self.decode(value, _MISSING, path) for key, value in group.items()}
            for group in node["groups"]
        ]
        there.param_groups[:] = groups  # Avalanche puts all into one at the first train
        numbers = iter(range(len(node["state"])))
        packed = [{**g, "params": [next(numbers) for _ in g["params"]]} for g in groups]
        states = [self.decode(state, _MISSING, path) for state in node["state"]]
        there.load_state_dict(
            {"state": {i: s for i, s in enumerate(states) if s}, "param_groups": packed}
        )
        if isinstance(there, PosteriorOptimizer):
            there.generator = self.decode(node["noise"], there.generator, path)
        return there
