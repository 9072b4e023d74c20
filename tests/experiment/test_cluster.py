"""Jobs for a cluster, tried as processes of this machine."""

import contextlib
import pickle
import time
from types import SimpleNamespace

import pytest
import submitit
from small_recipes import FEW, STRATEGIES, small_recipe

from covon_avalanche.experiment.cluster import ClusterRun, submit
from covon_avalanche.experiment.grid import RunSpec
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


@pytest.fixture
def recipe():
    return small_recipe(
        {"finetune": STRATEGIES["finetune"]}, epochs=1, train_mb_size=64, stream=FEW
    )


def test_submitted_runs_are_the_same_as_local_ones(recipe, tmp_path):
    jobs = [RunSpec("finetune", 0), RunSpec("finetune", 1)]
    submitted = submit(recipe, jobs, tmp_path, parameters=["timeout_min=5"], cluster="local")
    assert len(submitted) == 2
    folders = [RunFolder(tmp_path, recipe, "finetune", seed) for seed in (0, 1)]
    deadline = time.monotonic() + 300
    while not all(f.result_file.exists() for f in folders) and time.monotonic() < deadline:
        time.sleep(0.5)
    for seed, folder in enumerate(folders):
        assert folder.result().outcome() == run_strategy(recipe, "finetune", seed).outcome()
    assert list((tmp_path / "submitit").glob("*_log.out"))


def test_parameters_are_numbers_where_they_are_and_a_name_is_the_users(
    recipe, tmp_path, monkeypatch
):
    given = {}
    executor = SimpleNamespace(
        update_parameters=lambda **parameters: given.update(parameters),
        batch=contextlib.nullcontext,
        submit=lambda run: SimpleNamespace(job_id=1),
    )
    monkeypatch.setattr(submitit, "AutoExecutor", lambda *_, **__: executor)
    jobs, parameters = [RunSpec("finetune", 0)], ["mem_gb=1.5", "timeout_min=5", "comment=2.10"]
    parameters.append("account=0042")
    submit(recipe, jobs, tmp_path, parameters=parameters)
    expected = {"mem_gb": 1.5, "timeout_min": 5, "slurm_comment": "2.10"}
    expected["slurm_account"] = "0042"
    assert given == {**expected, "name": recipe.name}
    submit(recipe, jobs, tmp_path, parameters=["name=mine"])
    assert given["name"] == "mine"
    with pytest.raises(ValueError, match="mem_gb must be a number, got 'much'"):
        submit(recipe, jobs, tmp_path, parameters=["mem_gb=much"])


def test_a_requeued_job_is_the_same_call(recipe, tmp_path):
    job = ClusterRun(recipe, RunSpec("finetune", 0), tmp_path, RunOptions())
    again = pickle.loads(pickle.dumps(job.checkpoint())).function
    assert again == job
    assert again() == run_strategy(recipe, "finetune", 0).average_accuracy


def test_without_a_cluster_and_with_wrong_parameters(recipe, tmp_path):
    jobs = [RunSpec("finetune", 0)]
    with pytest.raises(ValueError, match="must look like KEY=VALUE, got 'partition'"):
        submit(recipe, jobs, tmp_path, parameters=["partition"], cluster="local")
    with pytest.raises(ValueError, match=r"the cluster does not take this: .*slurm_colour"):
        submit(recipe, jobs, tmp_path, parameters=["colour=blue"], cluster="local")


def test_jobs_that_the_cluster_refuses(recipe, tmp_path, monkeypatch):
    def refuse(run):
        raise submitit.core.utils.FailedSubmissionError("sbatch: error:\n invalid partition")

    executor = SimpleNamespace(
        update_parameters=lambda **_: None, batch=contextlib.nullcontext, submit=refuse
    )
    monkeypatch.setattr(submitit, "AutoExecutor", lambda *_, **__: executor)
    with pytest.raises(ValueError, match=r"cannot be submitted: sbatch: error: invalid p.*n$"):
        submit(recipe, [RunSpec("finetune", 0)], tmp_path)
