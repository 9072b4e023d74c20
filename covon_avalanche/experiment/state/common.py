"""What capturing and restoring a state agree upon."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
OF_TORCH = ("zeros", "ones", "empty", "zeros_like", "ones_like")
# Attributes of a strategy that are made again before they are used.
_SKIPPED = frozenset(
    ("experience", "dataloader", "adapted_dataset", "mbatch", "mb_output", "loss")
    + ("current_eval_stream", "_eval_streams", "_example_cache", "checkpointer")
)
_NONE: frozenset[str] = frozenset()


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


def generator_state(generator: np.random.Generator | np.random.RandomState | random.Random) -> Any:
    """What it will draw next."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def skipped_attributes(value: Any) -> frozenset[str]:
    """Attributes that are not stored; a class names its own in ``not_stored``."""
    return getattr(type(value), "not_stored", _SKIPPED if hasattr(value, "plugins") else _NONE)


def importable(value: Any) -> str:
    """A class or function as ``module:name``."""
    name = getattr(value, "__name__", "")
    if name in OF_TORCH and getattr(torch, name) is value:
        return f"torch:{name}"
    return f"{value.__module__}:{value.__qualname__}"
