"""Shared fixtures: a toy stream, a small model, and where real data lies."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_DATASETS_CACHE" not in os.environ:  # workers have that of the process that starts them
    DATASETS = TemporaryDirectory()
    os.environ["HF_DATASETS_CACHE"] = DATASETS.name

import pytest
from hypothesis import settings

# The process that starts the workers imports this file, too: torch and the like only in fixtures.

gc.disable()  # until all test modules have been imported
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


FROZEN = []


@pytest.fixture(autouse=True)
def little_garbage(request):
    """Exempt what exists, such as all that was imported, from the collections before each run."""
    known = [request.module, len(sys.modules)]  # some tests import more
    if known != FROZEN:
        FROZEN[:] = known
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def files_need_not_survive_a_power_failure():
    """The tests of one worker wait for the disk thousands of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def digits_are_read_once():
    """Reading the file takes longer than most runs on its images."""
    from sklearn import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", cache(datasets.load_digits))
        yield


@pytest.fixture(scope="session", autouse=True)
def domains_are_made_once():
    """Avalanche looks at each label of a domain, which takes a quarter of a short run."""
    from covon_avalanche import streams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "PermutedDigits", cache(streams.PermutedDigits))
        yield


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Finds the folder with real data; skips the test where the part it needs is missing."""
    folder = Path(os.environ.get("COVON_DATA", Path(__file__).parents[2] / "shared" / "data"))

    def find(needed: str) -> Path:
        if not (folder / needed).exists():
            pytest.skip(f"needs {needed} in {folder} (set COVON_DATA)")
        return folder

    return find


@pytest.fixture
def linear():
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


@pytest.fixture
def batch():
    import torch

    generator = torch.Generator().manual_seed(7)
    return torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


class InThisProcess(Executor):
    """A pool that runs what is submitted at once."""

    def __init__(self, processes, device):
        pass

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_this_process(monkeypatch):
    """Run grids and searches in the process of the test, where the boundary is not tested."""
    monkeypatch.setattr("covon_avalanche.experiment.grid.WorkerPool", InThisProcess)


@pytest.fixture
def forked(monkeypatch):
    """Worker processes are forked from one that has imported everything."""
    from terminal import forks

    context = forks()
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)


@pytest.fixture
def undrawn(monkeypatch):
    """Files of figures are a word, which takes no time."""
    monkeypatch.setattr("covon_avalanche.report.figures.rendered", lambda _, form: form.encode())
