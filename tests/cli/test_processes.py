"""``covon run --gpus`` and ``--processes``: several processes that train each run together."""

import sys
import time
from threading import Thread

import pytest
import torch
from small_recipes import FEW, STRATEGIES, saved, small_recipe
from terminal import check_ctrl_c, covon, forks, wait_until

from covon_avalanche.experiment import data_parallel, worker_pool


@pytest.fixture
def command(tmp_path):
    """A run, to be told in how many processes."""
    strategies = {"bad": {"kind": "finetune", "lr": 1e30}, "covon": STRATEGIES["covon"]}
    recipe = small_recipe(strategies, epochs=1, train_mb_size=64, stream=FEW, seeds=[0])
    return ["run", str(saved(recipe, tmp_path)), "--out", str(tmp_path / "out")]


@pytest.mark.usefixtures("in_this_process")
def test_failures_and_ctrl_c_leave_nothing_running_and_the_run_resumes(
    command, tmp_path, monkeypatch
):
    context, pools = forks(), []
    monkeypatch.setattr(worker_pool.multiprocessing, "get_context", lambda _: context)

    def recorded(processes):
        pools.append(worker_pool.WorkerPool(processes))
        return pools[-1]

    monkeypatch.setattr(data_parallel, "WorkerPool", recorded)
    command += ["--processes", "2", "--jobs", "1", "--checkpoint-minutes", "0", "--epochs", "100"]
    command += ["--strategies"]

    def has_checkpoint(begun):
        return any(p.stat().st_mtime > begun for p in (tmp_path / "out/covon").rglob("0*.pt"))

    def kill(begun):
        assert wait_until(lambda: has_checkpoint(begun))
        pools[1].workers[1][0].kill()

    killer = Thread(target=kill, args=[time.time()])
    killer.start()
    done = covon(*command, "bad,covon")
    killer.join()
    assert done.exit_code == 1, done.output
    failed, killed = sorted(done.stderr.splitlines())  # here both end before either is collected
    (log,) = (tmp_path / "out/bad").rglob("log.txt")
    assert failed.startswith("covon: bad, seed 0: FloatingPointError: the loss is")
    assert failed.endswith(f"; see {log}")
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert killed.startswith("covon: covon, seed 0: its process was killed")
    assert [len(pool.workers) for pool in pools] == [2, 2]
    assert not any(worker.is_alive() for pool in pools for worker, _ in pool.workers)

    begun = time.time()
    command = [sys.executable, "-m", "covon_avalanche", *command, "covon"]
    check_ctrl_c(command, lambda: has_checkpoint(begun))
    (log,) = (tmp_path / "out/covon").rglob("log.txt")
    assert "resumed at domain" in log.read_text(encoding="utf-8")


TWO, CUDA = ["--processes", "2"], ["--set", "device=cuda"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([*TWO, "--gpus", "2"], "--gpus 2 and --processes 2 exclude each other: give one of them"),
        ([*TWO, *CUDA], '--processes 2 is for device = "cpu", got "cuda": use --gpus'),
        ([*TWO, "--set", "train_mb_size=1"], "train_mb_size = 1 cannot be shared by 2 processes"),
        (["--gpus", "3"], '--gpus 3 needs --set device=cuda, the recipe has device = "cpu"'),
        (["--gpus", "3", *CUDA], "--gpus 3: this machine has 2 CUDA devices"),
    ],
)
def test_what_is_refused_before_anything_runs(options, sentence, command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    done = covon(*command, *options)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"covon: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
