"""Runs as jobs of a SLURM cluster, through submitit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covon_avalanche.experiment.grid import Job, run_job
from covon_avalanche.experiment.recipe import Recipe

_COMMON = {
    *("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("name", "stderr_to_stdout"),
}


class ClusterRun:
    """A run as submitit sends it. A requeued one goes on from its checkpoints."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __call__(self) -> float:
        """Run it with one thread, as everywhere, or go on; the average accuracy."""
        import torch

        torch.set_num_threads(1)
        return run_job(*self.arguments).average_accuracy

    def checkpoint(self) -> Any:
        """Before the job's time is up: submit the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(
    recipe: Recipe,
    jobs: Sequence[Job],
    folder: Path,
    *,
    dataset_root: str | None = None,
    options: Mapping[str, Any] | None = None,
    parameters: Sequence[str] = (),
    cluster: str | None = None,
) -> list[str]:
    """Send all jobs as one array.

    :param folder: of the runs, which all nodes must see; logs go to ``folder/submitit``.
    :param options: of :func:`run_in_folder`.
    :param parameters: ``KEY=VALUE`` of submitit's, those of SLURM alone without ``slurm_``.
    :param cluster: ``"local"`` for processes of this machine, to try it.
    :return: identifiers of the jobs.
    :raises ValueError: if there is no submitit, no cluster, or no such parameter, or the cluster
        refuses the jobs.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            "--launcher slurm needs submitit: pip install 'covon_avalanche[cluster]'"
        ) from None
    settings = _parameters(parameters)
    try:
        executor = submitit.AutoExecutor(folder / "submitit", cluster=cluster or "slurm")
        name = {} if cluster == "local" else {"name": recipe.name}
        executor.update_parameters(**{**name, **settings})
    except (RuntimeError, NameError, TypeError) as error:
        raise ValueError(f"the cluster does not take this: {error}") from error
    arguments = (folder.resolve(), dataset_root, dict(options or {}))
    runs = [ClusterRun(recipe, job, *arguments) for job in jobs]
    try:
        with executor.batch():
            submitted = [executor.submit(run) for run in runs]
    except (RuntimeError, OSError) as error:  # RuntimeError: submitit's FailedSubmissionError
        raise ValueError(f"the runs cannot be submitted: {' '.join(str(error).split())}") from error
    return [str(job.job_id) for job in submitted]


def _parameters(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (equals and key):
            raise ValueError(f"a parameter must look like KEY=VALUE, got {setting!r}")
        known = key in _COMMON or key.startswith("slurm_")
        found[key if known else f"slurm_{key}"] = _value(key, value)
    return found


def _value(key: str, text: str) -> int | float | str:
    if text.isdecimal() and text == str(int(text)):  # account=0042 is a text
        return int(text)
    if key != "mem_gb":  # the only one of them that has fractions: version=2.10 is a text
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"mem_gb must be a number, got {text!r}") from None
