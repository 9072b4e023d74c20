"""Worker processes: how many, and how they end."""

import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from terminal import in_a_terminal, wait_until

import covon_avalanche.experiment.run  # noqa: F401 (and Avalanche, before processes are forked)
from covon_avalanche.experiment.worker_pool import WorkerPool, choose_gpu, default_processes

WARNING = """
import contextlib, warnings
with open({!r}, "w") as file, contextlib.redirect_stderr(file):
    warnings.warn("two\\nlines")
"""


@pytest.mark.usefixtures("forked")
def test_a_killed_process_fails_its_own_task_and_leaves_no_files():
    before = {path.name for path in Path("/dev/shm").glob("*")}
    with WorkerPool(2) as pool:
        (first, second) = (pool.submit(time.sleep, 1) for _ in range(2))
        while len(pool.workers) < 2:
            time.sleep(0.05)
        pool.workers[0][0].kill()
        failed = [isinstance(f.exception(), BrokenProcessPool) for f in (first, second)]
        assert sorted(failed) == [False, True]
        assert [f.result() for f in [pool.submit(abs, -n) for n in range(4)]] == [0, 1, 2, 3]
        (worker, _) = pool.workers[1]
        new = {path.name for path in Path("/dev/shm").glob("*")} - before
        assert not [name for name in new if f"-{os.getpid()}-" in name]
    assert not worker.is_alive()


@pytest.mark.parametrize(
    ("gpus", "visible", "chosen"),
    [(0, None, [None]), (1, "3", ["3"]), (2, None, ["0", "1"]), (2, "5,7", ["5", "7"])],
)
def test_every_process_has_one_gpu(gpus, visible, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert default_processes("cuda") == max(1, gpus)
    found = []
    for number in range(3):
        with monkeypatch.context() as environment:
            if visible is None:
                environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            else:
                environment.setenv("CUDA_VISIBLE_DEVICES", visible)
            choose_gpu(number)
            found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    assert found == (3 * chosen)[:3]


class Recorded(WorkerPool):
    """Notes the numbers of its processes."""

    def _start(self, number):
        assert self.device == "cuda"
        self.numbers = [*getattr(self, "numbers", ()), number]
        return super()._start(number)


@pytest.mark.usefixtures("forked")
def test_a_process_that_replaces_a_killed_one_has_its_number():
    with Recorded(1, "cuda") as pool:
        assert pool.submit(abs, -1).result() == 1
        pool.workers[0][0].kill()
        assert isinstance(pool.submit(abs, -1).exception(), BrokenProcessPool)
        assert pool.submit(abs, -1).result() == 1
        assert pool.numbers == [0, 0]


@pytest.mark.usefixtures("forked")
def test_warnings_of_workers_are_one_line(tmp_path):
    with WorkerPool(1) as pool:
        pool.submit(exec, WARNING.format(str(tmp_path / "told"))).result()
    assert (tmp_path / "told").read_text() == "warning: two lines\n"


def test_a_library_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "avalanche.py").write_text("import a_missing_library")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerPool(1) as pool, pytest.raises(ImportError, match="a_missing_library"):
        pool.submit(int).result()


COMMAND = """
import sys, time
from pathlib import Path
from covon_avalanche.experiment.worker_pool import WorkerPool

def work(file):
    Path(file).touch()
    time.sleep(600)

if __name__ == "__main__":
    with WorkerPool(1) as pool:
        pool.submit(work, sys.argv[1])
"""


def test_workers_end_when_only_the_command_is_killed(tmp_path):
    (tmp_path / "avalanche/evaluation").mkdir(parents=True)
    for file in ("__init__", "evaluation/__init__", "evaluation/metrics"):  # to be imported at once
        (tmp_path / f"avalanche/{file}.py").touch()
    (tmp_path / "command.py").write_text(COMMAND)
    begun = tmp_path / "begun"
    with in_a_terminal([sys.executable, str(tmp_path / "command.py"), str(begun)]) as command:
        assert wait_until(begun.exists)
        command.kill()
        command.communicate(timeout=30)  # its output ends when the last that may write is gone


@pytest.mark.usefixtures("forked")
def test_errors_of_tasks_arrive_and_the_process_goes_on():
    with WorkerPool(1) as pool:
        first = pool.submit(os.getpid).result()
        for function, argument, error, text in (
            (exec, "raise SystemExit(3)", SystemExit, "3"),
            (bytes.decode, b"\xff", UnicodeDecodeError, "invalid start byte"),
        ):
            with pytest.raises(error, match=text):
                pool.submit(function, argument).result()
            assert pool.submit(os.getpid).result() == first
