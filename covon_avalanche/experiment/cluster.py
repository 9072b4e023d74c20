"""Runs as jobs of a SLURM cluster, through submitit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covon_avalanche.experiment.grid import RunSpec
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run_options import RunOptions

_COMMON = {
    *("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("name", "stderr_to_stdout"),
}


@dataclass(frozen=True)
class ClusterRun:
    """A run as submitit sends it. A requeued one is resumed from its checkpoints."""

    recipe: Recipe
    spec: RunSpec
    runs: Path
    options: RunOptions

    def __call__(self) -> float:
        """Run with one thread, as everywhere; the average accuracy."""
        import torch

        from covon_avalanche.experiment.run import run_in_folder

        torch.set_num_threads(1)
        return run_in_folder(self.recipe, *self.spec, self.runs, self.options).average_accuracy

    def checkpoint(self) -> Any:
        """Before the job's time is up: submit the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(
    recipe: Recipe,
    specs: Sequence[RunSpec],
    runs: Path,
    options: RunOptions = RunOptions(),
    *,
    parameters: Sequence[str] = (),
    cluster: str = "slurm",
) -> list[str]:
    """Send all runs as one job array.

    :param runs: folder that all nodes must see; logs go to its ``submitit``.
    :param parameters: ``KEY=VALUE`` of submitit's; those of SLURM alone without ``slurm_``.
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
    settings = dict(map(_parameter, parameters))
    if cluster != "local":
        settings.setdefault("name", recipe.name)
    try:
        executor = submitit.AutoExecutor(runs / "submitit", cluster=cluster)
        executor.update_parameters(**settings)
    except (RuntimeError, NameError, TypeError) as error:
        raise ValueError(f"the cluster does not take this: {error}") from error
    try:
        with executor.batch():
            jobs = [
                executor.submit(ClusterRun(recipe, spec, runs.resolve(), options)) for spec in specs
            ]
    except (RuntimeError, OSError) as error:  # RuntimeError: submitit's FailedSubmissionError
        raise ValueError(f"the runs cannot be submitted: {' '.join(str(error).split())}") from error
    return [str(job.job_id) for job in jobs]


def _parameter(setting: str) -> tuple[str, int | float | str]:
    key, equals, text = setting.partition("=")
    if not (equals and key):
        raise ValueError(f"a parameter must look like KEY=VALUE, got {setting!r}")
    known = key in _COMMON or key.startswith("slurm_")
    return (key if known else f"slurm_{key}"), _value(key, text)


def _value(key: str, text: str) -> int | float | str:
    if text.isdecimal() and text == str(int(text)):  # account=0042 is a text
        return int(text)
    if key != "mem_gb":  # the only one with fractions: version=2.10 is a text
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"mem_gb must be a number, got {text!r}") from None
