"""``covon run --gpus`` and ``--processes``: several processes that train each run together."""

import os
import signal
import sys
import time
from subprocess import PIPE, Popen

import psutil
import pytest
import torch
from small_recipes import FEW, STRATEGIES, saved, small_recipe
from terminal import covon, in_a_terminal, wait_until


@pytest.fixture
def command(tmp_path):
    """A run in two processes."""
    strategies = {"bad": {"kind": "finetune", "lr": 1e30}}
    strategies |= {name: STRATEGIES[name] for name in ("covon", "replay")}
    recipe = small_recipe(strategies, epochs=1, train_mb_size=64, stream=FEW, seeds=[0])
    return ["run", str(saved(recipe, tmp_path)), "--out", str(tmp_path / "out"), "--processes", "2"]


def alive(processes):
    """Those that still run, after up to ten seconds."""
    return psutil.wait_procs(processes, timeout=10)[1]


def test_failures_and_ctrl_c_leave_nothing_running_and_the_run_resumes(command, tmp_path):
    command = [sys.executable, "-m", "covon_avalanche", *command, "--checkpoint-minutes", "0"]
    command += ["--epochs", "100", "--jobs", "1", "--strategies"]

    def wait_for_checkpoint():
        begun, checkpoints = time.time(), (tmp_path / "out/covon").rglob
        assert wait_until(lambda: any(p.stat().st_mtime > begun for p in checkpoints("0*.pt")))

    with Popen([*command, "bad,covon"], stdout=PIPE, stderr=PIPE, text=True) as process:
        wait_for_checkpoint()
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [p for p in children if len(p.parents()) == max(len(c.parents()) for c in children)]
        assert len(ranks) >= 2
        ranks[-1].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    failed, killed = errors.splitlines()
    (log,) = (tmp_path / "out/bad").rglob("log.txt")
    assert failed.startswith("covon: bad, seed 0: FloatingPointError: the loss is")
    assert failed.endswith(f"; see {log}")
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert killed.startswith("covon: covon, seed 0: its process was killed")
    assert not alive(children)

    with in_a_terminal([*command, "covon"]) as process:
        wait_for_checkpoint()
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Interrupted; the same command resumes from here." in output
    assert "Traceback" not in errors
    assert not alive(children)
    (log,) = (tmp_path / "out/covon").rglob("log.txt")
    assert "resumed at domain" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [],
            'strategy replay (kind = "replay") is not tested with several processes: train it with',
        ),
        (["--gpus", "2"], "--gpus 2 and --processes 2 exclude each other: give one of them"),
        (["--set", "device=cuda"], '--processes 2 is for device = "cpu", got "cuda": use --gpus'),
        (["--set", "train_mb_size=1"], "train_mb_size = 1 cannot be shared by 2 processes"),
    ],
)
def test_what_is_refused_before_anything_runs(options, sentence, command, tmp_path):
    done = covon(*command, *options)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"covon: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_gpus_must_be_there(command, monkeypatch):
    command = [*command[:-2], "--gpus", "3"]
    done = covon(*command)
    assert (done.exit_code, done.stderr) == (
        2,
        'covon: --gpus 3 needs --set device=cuda, the recipe has device = "cpu"\n',
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    done = covon(*command, "--set", "device=cuda")
    assert (done.exit_code, done.stderr) == (
        2,
        "covon: --gpus 3: this machine has 2 CUDA devices\n",
    )
