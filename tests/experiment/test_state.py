"""States of runs as JSON and tensors, and back."""

import collections
import copy
import io
import random
import re
import shutil
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from avalanche.training.utils import ParamData
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data.datapipes.iter import FileOpener
from toys import toy_benchmark

from covon_avalanche.experiment.state import Node, StateError, benchmark_data, capture, restore

Kind = Enum("Kind", "A B")


@dataclass(slots=True)
class Counter:
    """Has no ``__dict__``."""

    n: int


class NamedCounter(Counter):
    """Has slots and a ``__dict__``."""


class Named(str):
    """More than its text."""


class Thing:
    """Stands for a plugin."""

    not_stored = frozenset({"temporary"})

    def __init__(self, **values):
        vars(self).update(values)


def from_file(state):
    """The state as ``torch.load`` reads it."""
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    with torch.serialization.safe_globals([Node]):
        return torch.load(file, weights_only=True)


def through(root, fresh):
    """Store ``root``, and restore it into ``fresh``."""
    restore(from_file(capture(root, {})), fresh, {})
    return fresh


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.builds(deque, st.lists(inner))
        | st.builds(OrderedDict, st.dictionaries(st.text(), inner))
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    found = through({"value": value}, {"value": None})["value"]
    assert found == value
    assert type(found) is type(value)


def test_everything_else_that_runs_are_made_of():
    root = {
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "enum": Kind.A,
        "bounded": deque([1, 2], maxlen=2),
        "counts": defaultdict(int, a=1),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "number": np.float64(0.5),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "range": range(1, 9, 2),
        "infinite": float("-inf"),
    }
    known = {"counts": defaultdict(int), "enum": Kind.B}
    found = through(root, {**dict.fromkeys(root), **known})
    for name in ("array", "half", "flag", "empty", "transposed"):
        assert torch.equal(torch.as_tensor(found.pop(name)), torch.as_tensor(root.pop(name)))
    assert found == root
    assert found["bounded"].maxlen == 2
    assert found["counts"]["new"] == 0
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in root.items()}


NUMPY = [
    lambda seed, kind=kind: np.random.Generator(getattr(np.random, kind)(seed))
    for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
]


def torchs(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("make", [torchs, *NUMPY, np.random.RandomState, random.Random])
def test_generators_of_plugins_continue(make):
    def draw(generator):
        """Something that depends on all of a generator's state."""
        if isinstance(generator, torch.Generator):
            return torch.randn(3, generator=generator).tolist()
        if isinstance(generator, random.Random):
            return [generator.gauss(0, 1), generator.random()]
        return [*generator.normal(size=3), generator.bytes(3)]

    generator, mine = make(1), make(2)
    draw(generator)
    stored = from_file(capture({"rng": generator}, {}))
    assert through({"rng": generator}, {"rng": mine})["rng"] is mine
    assert draw(mine) == draw(generator)
    with pytest.raises(StateError, match="the new run has no such generator"):
        restore(stored, {"rng": None}, {})


def test_objects_without_a_state_are_those_of_the_new_run(tmp_path):
    with (tmp_path / "log").open("w") as file, (tmp_path / "new").open("w") as new_file:
        old = [threading.Lock(), threading.RLock(), Path("x"), re.compile("x"), object(), file]
        new = [threading.Lock(), threading.RLock(), Path("y"), re.compile("y"), object(), new_file]
        assert through({"values": old}, {"values": [*new]})["values"] == new


def test_objects_keep_their_identity_and_what_is_not_stored():
    inner = Thing(values=[1])
    plugin = Thing(inner=inner, same=inner, temporary="old", function=lambda: 1)
    fresh_inner, function = Thing(values=[]), lambda: 2
    fresh = Thing(inner=fresh_inner, same=None, temporary="new", function=function, gone=1)
    through({"plugin": plugin}, {"plugin": fresh})
    assert fresh.inner is fresh.same is fresh_inner
    assert fresh.inner.values == [1]
    assert (fresh.temporary, fresh.function) == ("new", function)
    assert not hasattr(fresh, "gone")


def test_two_things_do_not_become_one_where_the_new_run_has_one():
    shared = Thing(n=0)
    fresh = {"a": shared, "b": shared, "known": None}
    root = {"a": ParamData("a", shape=(1,)), "b": ParamData("b", shape=(1,)), "known": None}
    found = through(root, fresh)
    assert found["a"] is not found["b"]
    assert (found["a"].name, found["b"].name) == ("a", "b")


def test_cycles_and_shared_memory():
    tensor = torch.arange(4.0)
    root = {"list": [], "whole": tensor, "part": tensor[1:3], "again": tensor}
    root["list"].append(root["list"])
    found = through(root, dict.fromkeys(root))
    assert found["list"][0] is found["list"]
    assert found["again"] is found["whole"]
    found["whole"][1] = 7
    assert found["part"][0] == 7


def test_a_model_its_copy_and_its_optimizer():
    def build():
        model = nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "old": None}

    def step(run, x):
        run["model"](x).square().mean().backward()
        run["optimizer"].step()

    x, run = torch.randn(5, 3), build()
    step(run, x)
    run["model"].weight.register_hook(print)
    run["model"].weight.own = Thing()  # neither of both is stored
    run["old"] = copy.deepcopy(run["model"]).requires_grad_(False).eval()
    run["names"] = dict(run["model"].named_parameters())
    fresh = through(run, {**build(), "names": {}})
    assert fresh["names"]["weight"] is fresh["model"].weight
    assert fresh["old"] is not fresh["model"]
    assert not fresh["old"].training
    assert not fresh["old"].weight.requires_grad
    assert torch.equal(fresh["model"].weight.grad, run["model"].weight.grad)
    for made in (run, fresh):
        step(made, x)
    assert torch.equal(fresh["model"].weight, run["model"].weight)
    assert not torch.equal(fresh["model"].weight, fresh["old"].weight)


def test_data_of_the_benchmark_is_named_not_stored():
    benchmark, again = toy_benchmark(2), toy_benchmark(2)
    buffer = ReservoirSamplingBuffer(7)
    buffer.update_from_dataset(benchmark.train_stream[1].dataset)
    root = {"buffer": buffer, "experience": benchmark.train_stream[0]}
    state = capture(root, benchmark_data(benchmark.streams))
    torch.save(state, file := io.BytesIO())
    tensors = [part.file_size for part in ZipFile(file).infolist() if "/data/" in part.filename]
    assert sum(tensors) < sum(x.nbytes for x, *_ in benchmark.train_stream[1].dataset)
    fresh = {"buffer": ReservoirSamplingBuffer(7), "experience": None}
    restore(from_file(state), fresh, benchmark_data(again.streams))
    assert fresh["experience"] is again.train_stream[0]
    assert len(fresh["buffer"].buffer) == 7
    for mine, theirs in zip(fresh["buffer"].buffer, buffer.buffer, strict=True):
        assert torch.equal(mine[0], theirs[0])


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (iter([1]), "is a list_iterator, whose values are not all in its __dict__"),
        ((i for i in range(3)), "cannot be stored: cannot pickle 'generator' object"),
        (np.array(["a", "b"]), "cannot be stored: can't convert"),
        (type("Word", (str,), {})("a"), "is a Word, whose values"),
        (1j, "is a complex, whose values"),
        (Counter(3), "is a Counter, whose values are not all in its __dict__"),
        (NamedCounter(3), "is a NamedCounter, whose values"),
        (Named("a"), "is a Named, whose values"),
        (collections.Counter("a"), "is a Counter, whose values"),
    ],
)
def test_what_cannot_be_stored_is_named(value, sentence):
    with pytest.raises(StateError, match=rf"run\['plugin'\]\.loader {sentence}"):
        capture({"plugin": Thing(loader=value)}, {})


def test_what_the_new_run_lacks_is_named():
    root = {"plugin": Thing(log=print, path=Path("x"), sentinel=object())}
    fresh = {"plugin": Thing(log=print, path=Path("y"), sentinel=object())}
    mine = dict(vars(fresh["plugin"]))
    assert vars(through(root, fresh)["plugin"]) == mine
    with pytest.raises(StateError, match=r"\['plugin'\]\.log: builtins:print must not be created"):
        through(root, {"plugin": Thing()})
    with pytest.raises(StateError, match=r"test_state:Thing must not be created from a file"):
        through(root, {"plugin": None})


def test_another_model_is_refused():
    state = from_file(capture({"model": nn.Linear(3, 2)}, {}))
    for other, name in ((nn.Linear(4, 2), "weight"), (nn.Linear(3, 2, bias=False), "bias")):
        with pytest.raises(StateError, match=f"is another model: it differs in {name}$"):
            restore(state, {"model": other}, {})


@pytest.mark.parametrize(
    "node",
    [
        Node("function", "os:system"),
        Node("function", "torch:load"),
        Node("function", "covon_avalanche.atomic_write:os.system"),
        Node("function", "covon_avalanche.atomic_write:write_atomically"),
        Node("partial", content=[Node("function", "os:system"), ["x"], {}]),
        Node("defaultdict", Node("function", "os:system"), {}),
        Node("object", "subprocess:Popen", {}),
        Node("object", f"{FileOpener.__module__}:{FileOpener.__name__}", {}),
        Node("object", "covon_avalanche.experiment.cluster:ClusterRun", {}),
        Node("object", "covon_avalanche.posterior.gaussian:Tensor", {}),
        Node("object", "covon_avalanche.posterior.gaussian:dataclass", {}),
        Node("tuple", "covon_avalanche.posterior.gaussian:DiagGaussian", []),
        Node("enum", "os:environ", "PATH"),
        Node("enum", "covon_avalanche.posterior.gaussian:DiagGaussian", "a"),
    ],
)
def test_files_that_name_code_are_refused(node):
    with pytest.raises(StateError, match="must not be created from a file"):
        restore(from_file(node), None, {})


def test_a_function_of_the_run_does_not_come_back_with_other_arguments():
    there = {"own": shutil.rmtree, "partial": None}
    state = capture({**there, "partial": partial(shutil.rmtree, "x")}, {})
    with pytest.raises(StateError, match="shutil:rmtree must not be created from a file"):
        restore(from_file(state), there, {})
