"""``covon run --launcher slurm`` on a real SLURM, such as that of ``tests/slurm_one_node.sh``."""

import re
import shutil
import subprocess
from functools import partial

import pytest
from small_recipes import FEW, reproducible, run_strategy, saved, small_recipe
from terminal import covon, wait_until

from covon_avalanche.experiment.run_folder import run_folders

WAITS = """
import time
from pathlib import Path
from avalanche.training.plugins import SupervisedPlugin

class Waits(SupervisedPlugin):
    def __init__(self, file):
        self.file = file

    def after_training_epoch(self, *args, **kwargs):
        while not Path(self.file).exists():
            time.sleep(0.1)
"""


def slurm(*command):
    """What a command of SLURM prints; nothing if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout


def nearly_now(job):
    """A time limit that is within two minutes, when SLURM warns the job."""
    times = re.search(r"RunTime=(\d+):(\d+)", slurm("scontrol", "show", "job", job))
    hours, minutes = map(int, times.groups())
    return f"TimeLimit={60 * hours + minutes + 2}"


def has_checkpoint(folder):
    return any(folder.checkpoint_folder.glob("*.pt"))


def has_ended(folder):
    return not folder.is_running()


def test_interrupted_jobs_end_with_the_results_of_local_runs(tmp_path, monkeypatch):
    """One is requeued, one reaches its time limit, one is cancelled; each in its first epoch."""
    if not slurm("sinfo", "--noheader", "--states=idle"):
        pytest.skip("needs root and an idle SLURM node: tests/slurm_one_node.sh starts one")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    custom = dict(kind="custom", lr=0.01, implementation="waits:Waits")
    names = ("requeued", "limited", "cancelled")
    strategies = {name: {**custom, "arguments": {"file": name}} for name in names}
    recipe = small_recipe(strategies, epochs=2, train_mb_size=64, stream=FEW, seeds=[0])
    command = ["run", saved(recipe, tmp_path), "--out", "out", "--checkpoint-minutes", "0"]
    command += ["--launcher", "slurm", "--slurm", "timeout_min=30"]
    folders = run_folders(recipe, tmp_path / "out")

    done = covon(*command)
    array = re.match(r"3 jobs of .*: (\d+)_0 to \1_2\n", done.stdout)[1]
    jobs = [f"{array}_{index}" for index in range(3)]
    for name, job, folder in zip(names, jobs, folders, strict=True):
        assert wait_until(partial(has_checkpoint, folder))
        if name == "requeued":
            slurm("scontrol", "requeue", job)
        elif name == "limited":
            slurm("scontrol", "update", f"JobId={job}", nearly_now(job))
        else:
            slurm("scancel", job)
        assert wait_until(partial(has_ended, folder))
        (tmp_path / name).touch()
    slurm("scontrol", "update", f"JobId={jobs[1]}", "TimeLimit=30")
    assert wait_until(lambda: all(folder.result_file.exists() for folder in folders[:2]))
    assert not folders[2].result_file.exists()

    again = covon(*command)
    assert again.stdout.startswith("1 jobs of"), again.output
    assert wait_until(folders[2].result_file.exists)
    for folder in folders:
        result = folder.result()
        assert result.resumed == 1
        local = run_strategy(recipe, folder.strategy, folder.seed)
        assert reproducible(result) == reproducible(local)
