"""Runs as jobs of a SLURM cluster, through submitit."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import submitit
from submitit.helpers import Checkpointable, DelayedSubmission

from covon_avalanche.experiment.recipe import parse_setting
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import import_avalanche

_TIME_LIMITS = 100  # which a job may reach; submitit's default of 3 is for jobs that cannot resume


class ClusterRun(Checkpointable):
    """A run as a job. It is submitted again before its time is up, and resumes from the run's
    checkpoints."""

    def __call__(self, folder: RunFolder, options: RunOptions) -> float:
        """Run with a single thread, like local runs; the average accuracy."""
        import_avalanche()
        import torch

        from covon_avalanche.experiment.run import run_in_folder

        torch.set_num_threads(1)
        return run_in_folder(folder, options).average_accuracy

    def checkpoint(self, folder: RunFolder, options: RunOptions) -> DelayedSubmission:
        """The same call, to be queued again. submitit exits then, which is not a failure."""
        again = super().checkpoint(copy.copy(folder), options)
        folder.failures = (Exception,)
        return again


def submit(
    folders: Sequence[RunFolder],
    options: RunOptions = RunOptions(),
    *,
    parameters: Sequence[str] = (),
    cluster: str = "slurm",
) -> list[str]:
    """Send all runs of a recipe as one job array.

    :param folders: those of the runs, with absolute paths that all nodes must see; logs go to
        ``submitit`` beside those of the strategies.
    :param parameters: ``KEY=VALUE`` by submitit's names, with TOML values.
    :param cluster: ``"local"`` for processes of this machine, to try it.
    :return: identifiers of the jobs.
    :raises ValueError: if submitit rejects a parameter or the jobs.
    """
    recipe, runs = folders[0].recipe, folders[0].path.parents[1]
    settings = dict(map(parse_setting, parameters))
    if cluster != "local":
        settings.setdefault("name", recipe.name)
    try:
        executor = submitit.AutoExecutor(
            runs / "submitit", cluster=cluster, slurm_max_num_timeout=_TIME_LIMITS
        )
        executor.update_parameters(**settings)
    except (RuntimeError, NameError, TypeError) as error:
        raise ValueError(f"submitit rejected a parameter: {error}") from error
    try:
        with executor.batch():
            jobs = [executor.submit(ClusterRun(), folder, options) for folder in folders]
    except (RuntimeError, OSError) as error:  # RuntimeError: submitit's FailedSubmissionError
        raise ValueError(f"the runs cannot be submitted: {' '.join(str(error).split())}") from error
    return [str(job.job_id) for job in jobs]
