"""Commands without processes, where the process boundary is not what is tested."""

from concurrent.futures import Future
from contextlib import contextmanager

import pytest


class InThisProcess:
    """A pool that runs what is submitted at once."""

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_this_process(monkeypatch):
    """Run grids and searches in the process of the test."""

    @contextmanager
    def worker_pool(*_, **__):
        yield InThisProcess()

    monkeypatch.setattr("covon_avalanche.experiment.grid.worker_pool", worker_pool)
    monkeypatch.setattr("covon_avalanche.cli.search.worker_pool", worker_pool)
