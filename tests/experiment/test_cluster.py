"""Jobs for a cluster, tried as processes of this machine."""

import pickle
import sys
from unittest.mock import MagicMock

import pytest
import submitit
from small_recipes import reproducible, run_strategy
from terminal import wait_until

from covon_avalanche.experiment.cluster import ClusterRun, submit
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


def test_a_submitted_run_is_the_same_as_a_local_one(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 1)
    assert len(submit([folder], parameters=["timeout_min=5"], cluster="local")) == 1
    assert wait_until(folder.result_file.exists, seconds=300)
    assert reproducible(folder.result()) == reproducible(run_strategy(recipe, "finetune", 1))
    assert list((tmp_path / "submitit").glob("*_log.out"))


def executor_of(monkeypatch):
    """In place of submitit's."""
    made = MagicMock()
    monkeypatch.setattr(submitit, "AutoExecutor", made)
    return made.return_value


def test_parameters_are_toml_values_and_the_name_is_the_recipes(recipe, tmp_path, monkeypatch):
    executor = executor_of(monkeypatch)
    given = executor.update_parameters
    limits = {"slurm_max_num_timeout": 100}  # submitit's own are 3
    jobs = [RunFolder(tmp_path, recipe, "finetune", seed) for seed in (0, 1)]
    assert len(submit(jobs, parameters=["mem_gb=1.5", "slurm_account=0042"])) == 2
    assert [call.args[1] for call in executor.submit.call_args_list] == jobs
    submitit.AutoExecutor.assert_called_with(tmp_path / "submitit", cluster="slurm", **limits)
    given.assert_called_with(mem_gb=1.5, slurm_account="0042", name=recipe.name)
    submit(jobs, parameters=["name=mine"])
    given.assert_called_with(name="mine")


def test_jobs_and_parameters_that_are_refused(recipe, tmp_path, monkeypatch):
    jobs = [RunFolder(tmp_path, recipe, "finetune", 0)]
    with pytest.raises(ValueError, match="must look like KEY=VALUE, got 'partition'"):
        submit(jobs, parameters=["partition"], cluster="local")
    with pytest.raises(ValueError, match=r"submitit rejected a parameter: .*colour"):
        submit(jobs, parameters=["colour=blue"], cluster="local")

    refused = submitit.core.utils.FailedSubmissionError("sbatch: error:\n invalid partition")
    executor_of(monkeypatch).submit.side_effect = refused
    with pytest.raises(ValueError, match=r"cannot be submitted: sbatch: error: invalid p.*n$"):
        submit(jobs)


def test_a_requeued_job_is_the_same_call(recipe, tmp_path):
    arguments = RunFolder(tmp_path, recipe, "finetune", 0), RunOptions()
    again = pickle.loads(pickle.dumps(ClusterRun().checkpoint(*arguments)))
    assert again.args[0].path == arguments[0].path
    assert again.function(*again.args) == run_strategy(recipe, "finetune", 0).average_accuracy


def test_a_run_that_is_queued_again_is_interrupted_and_not_failed(recipe, tmp_path, monkeypatch):
    job, folder = ClusterRun(), RunFolder(tmp_path, recipe, "finetune", 0)

    def requeued(*args):
        again.append(job.checkpoint(folder, RunOptions()))
        sys.exit(-1)  # as submitit does

    again = []
    monkeypatch.setattr(RunFolder, "on_domain", requeued)
    with pytest.raises(SystemExit):
        job(folder, RunOptions())
    assert folder.state()[0] == "interrupted"
    assert "Traceback" not in folder.log_file.read_text("utf-8")
    monkeypatch.setattr(RunFolder, "on_domain", lambda *args: sys.exit(1))
    with pytest.raises(SystemExit):
        again[0].function(*again[0].args)
    assert folder.state() == ("failed", "SystemExit: 1")
