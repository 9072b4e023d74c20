"""Random generators of numpy and Python as JSON, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from covon_avalanche.experiment.state.common import State, StateError

Generator = np.random.Generator | np.random.RandomState | random.Random
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def state_of(generator: Generator) -> State:
    """What it will draw, as JSON."""
    if isinstance(generator, np.random.Generator):
        return {"of": "numpy", "state": _plain(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"of": "numpy before 1.17", "state": _plain(generator.get_state(legacy=False))}
    version, numbers, gauss = generator.getstate()
    return {"of": "Python", "state": [version, list(numbers), gauss]}


def with_state(node: State, there: Any) -> Generator:
    """The generator that is there, if it is of this kind, or a new one, in that state.

    :raises StateError: for a kind that is not known.
    """
    state = node["state"]
    if node["of"] == "Python":
        version, numbers, gauss = state
        python = there if isinstance(there, random.Random) else random.Random()
        python.setstate((version, tuple(numbers), gauss))
        return python
    if node["of"] == "numpy before 1.17":
        old = there if isinstance(there, np.random.RandomState) else np.random.RandomState()
        old.set_state(state)
        return old
    kind = state["bit_generator"]
    if kind not in _BIT_GENERATORS:
        raise StateError(f"numpy has no bit generator {kind!r}")
    bits = getattr(np.random, kind)
    fits = isinstance(there, np.random.Generator) and type(there.bit_generator) is bits
    numpy = there if fits else np.random.Generator(bits())
    numpy.bit_generator.state = state
    return numpy


def _plain(state: Any) -> Any:
    """Arrays as lists."""
    if isinstance(state, dict):
        return {key: _plain(part) for key, part in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
