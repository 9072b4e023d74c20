"""The progress of many runs, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn

from covon_avalanche.experiment.grid import Outcome
from covon_avalanche.experiment.run_folder import RunFolder, RunSpec


class GridProgress:
    """In a terminal, a bar per run in progress and one for all of them; elsewhere a line per
    domain learned and per finished run.

    Its methods fit :func:`run_grid`.
    """

    def __init__(self, console: Console, folders: Sequence[RunFolder]) -> None:
        self.outcomes: list[Outcome] = []
        """Outcomes in the order in which the runs ended."""
        self.bars = Progress(
            "{task.description}",
            BarColumn(),
            "{task.percentage:.0f} %",
            TimeRemainingColumn(),
            "{task.fields[text]}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=3600,
        )
        self._folders = {folder.spec: folder for folder in folders}
        self._all = self.bars.add_task("all runs", total=len(folders), text="")
        self._tasks: dict[RunSpec, TaskID] = {}
        self._domains: dict[RunSpec, int] = {}

    def poll(self, here: list[RunSpec], elsewhere: list[RunSpec]) -> None:
        """Read the progress of these runs, and of those that other processes are running."""
        for spec in here + elsewhere:
            if spec not in self._tasks:
                self._tasks[spec] = self.bars.add_task(_name(spec), total=1, text="starting")
                if spec in elsewhere:
                    self._print(f"{_name(spec)}: another process is running it")
            if (status := self._folders[spec].status()) is None:
                continue
            text = str(status) or "starting"
            self.bars.update(self._tasks[spec], completed=status.share, text=text)
            if self._domains.setdefault(spec, 0) < status.domains < status.of_domains:
                domain = f"domain {status.domains}/{status.of_domains}"
                self._print(f"{_name(spec)}: {domain}, A_t {100 * (status.accuracy or 0):.2f} %")
                self._domains[spec] = status.domains
        shares = (task.completed for task in self.bars.tasks if task.id in self._tasks.values())
        self.bars.update(self._all, completed=len(self.outcomes) + sum(shares))

    def end(self, outcome: Outcome) -> None:
        """Record that a run has ended."""
        self.outcomes.append(outcome)
        self.bars.update(self._all, completed=len(self.outcomes))
        if outcome.spec in self._tasks:
            self.bars.remove_task(self._tasks.pop(outcome.spec))
        result = outcome.result
        if result is not None:
            accuracy, seconds = 100 * result.average_accuracy, sum(result.train_seconds)
            line = f"{_name(outcome.spec)}: A_T {accuracy:.2f} %, {seconds:.1f} s"
            self._print(line + " (cached)" * outcome.cached)

    def _print(self, line: str) -> None:
        """Print a line, unless there are bars."""
        if self.bars.disable:
            self.bars.console.print(line, soft_wrap=True, markup=False)


def _name(spec: RunSpec) -> str:
    return f"{spec.strategy}, seed {spec.seed}"
