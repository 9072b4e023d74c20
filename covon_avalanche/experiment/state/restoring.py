"""From JSON and tensors to the objects of a run that was newly built."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from avalanche.benchmarks.utils import transform_groups
from torch import Tensor, nn
from torch.optim import Optimizer

from covon_avalanche.experiment.state.capturing import (
    FUNCTIONS,
    OF_TORCH,
    ExternalObjects,
    State,
    StateError,
    importable,
    skipped_attributes,
)

# Modules whose classes a file may name.
_TRUSTED = (
    *("avalanche.", "torch.utils.data.", "covon_avalanche.evaluation."),
    *("covon_avalanche.posterior.gaussian.", "covon_avalanche.optim.", "covon_avalanche.plugins."),
)
# All functions that a file may name where the new run does not have the same one.
_KNOWN_FUNCTIONS = {f"torch:{name}": getattr(torch, name) for name in OF_TORCH} | {
    "avalanche.benchmarks.utils.transform_groups:identity": transform_groups.identity
}
_MISSING: Any = object()


def restore(
    state: State, tensors: Mapping[str, Tensor], root: Any, external: ExternalObjects
) -> None:
    """Fill a newly built run in place with what ``capture`` returned.

    :param root: as for ``capture``; the model's parameters, the optimizer and the plugins stay
        the same objects.
    :raises StateError: naming what does not fit. The run may be half filled then.
    """
    restoring = _Restore(state["nodes"], tensors, external)
    restoring.decode(state["root"], root, "run")


class _Restore:
    def __init__(
        self, nodes: list[State], tensors: Mapping[str, Tensor], external: ExternalObjects
    ) -> None:
        self.nodes, self.tensors, self.external = nodes, tensors, external
        self._made: dict[int, Any] = {}
        self._storages: dict[str, Tensor] = {}
        self._claimed: set[int] = set()  # what is there already may stand for one node only

    def decode(self, value: Any, there: Any, path: str) -> Any:
        """The value; ``there`` is the new run's value in its place."""
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
                if node["name"] not in self.external.objects:
                    raise StateError(f"{path}: the benchmark has no {node['name']}")
                return self.external.objects[node["name"]]
            case "unchanged":
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
            case "array":
                return self._view(node).numpy()
            case "number":
                return self._view(node).numpy()[()]
            case "partial":
                return self._partial(node, path)
            case "generator":
                generator = there if isinstance(there, torch.Generator) else torch.Generator()
                return generator.set_state(self._view(node))
            case "device":
                return torch.device(node["name"])
            case "range":
                return range(*node["items"])
            case "dict" | "OrderedDict" | "defaultdict":
                return self._dict(number, node, there, path)
            case "list" | "deque" | "tuple" | "set":
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
        if isinstance(there, FUNCTIONS) and importable(there) == name:
            return there
        if name not in _KNOWN_FUNCTIONS:
            raise StateError(f"{path}: a {name} is not made from a file")
        return _KNOWN_FUNCTIONS[name]

    def _partial(self, node: State, path: str) -> functools.partial:
        """Of known functions only: other functions could do harm with other arguments."""
        function, arguments, keywords = node["parts"]
        known = self._function(self.nodes[function["#"]].get("name", ""), _MISSING, path)
        arguments = self.decode(arguments, _MISSING, path)
        return functools.partial(known, *arguments, **self.decode(keywords, _MISSING, path))

    def _class(self, name: str, there: Any, path: str, kind: type = object) -> Any:
        """The class of ``there``, or a trusted one that its module defines, not only imports."""
        found: Any = type(there)
        if there is _MISSING or importable(found) != name:
            module, _, qualname = name.partition(":")
            if not f"{module}.".startswith(_TRUSTED):
                raise StateError(f"{path}: a {name} is not made from a file")
            found = sys.modules.get(module)
            for part in qualname.split("."):
                found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, kind) and importable(found) == name):
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
        kinds = {"tuple": tuple, "set": set}
        return kinds[node["is"]](made) if node["is"] in kinds else made

    def _object(self, number: int, node: State, there: Any, path: str) -> Any:
        cls = self._class(node["class"], there, path)
        if type(there) is not cls:
            there = cls.__new__(cls)
        self._made[number] = there
        self._claimed.add(id(there))
        attributes, before = vars(there), dict(vars(there))
        skipped = skipped_attributes(there)
        for name in before:
            if name not in node["attributes"] and name not in skipped:
                del attributes[name]
        for name, value in node["attributes"].items():
            old = before.get(name, _MISSING)
            attributes[name] = self.decode(value, old, f"{path}.{name}")
        return there

    def _module(self, node: State, there: Any, path: str) -> nn.Module:
        if not isinstance(there, nn.Module) or importable(type(there)) != node["class"]:
            alike = [m for m in self._made.values() if isinstance(m, nn.Module)]
            alike = [m for m in alike if importable(type(m)) == node["class"]]
            if not alike:
                raise StateError(f"{path}: a {node['class']} cannot be made again")
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
        """Copy stored values into a model's tensor, whose memory others may share again."""
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
        if not isinstance(there, Optimizer) or importable(type(there)) != node["class"]:
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
        return there
