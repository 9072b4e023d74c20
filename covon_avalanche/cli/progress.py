"""The progress of many runs, read from their folders."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from covon_avalanche.cli.options import BAD_INPUT, INTERRUPTED
from covon_avalanche.experiment.grid import Outcome
from covon_avalanche.experiment.run_folder import RunFolder


class _Text(ProgressColumn):
    """Text that is cut where the terminal is narrow, before the other columns are."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.template = template

    def render(self, task: Task) -> Text:
        text = self.template.format(task=task)
        return Text(text, no_wrap=True, overflow="ellipsis")


class GridProgress:
    """In a terminal, a bar per run in progress and one for all of them; elsewhere a line per
    domain learned and per finished run."""

    def __init__(self, console: Console, total: int) -> None:
        self.outcomes: list[Outcome] = []
        """Outcomes in the order in which the runs ended."""
        self.bars = Progress(
            _Text("{task.description}"),
            BarColumn(10, table_column=Column(no_wrap=True)),
            "{task.percentage:.0f} %",
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _Text("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=3600,
        )
        self._all = self.bars.add_task("all runs", total=total, text="")
        self._tasks: dict[RunFolder, TaskID] = {}
        self._domains: dict[RunFolder, int] = {}
        self._warned: set[str] = set()

    def follow(self, run: Callable[..., None]) -> int:
        """Call :func:`run_grid`, or a function with its ``on_end`` and ``poll``; print why runs
        have failed, and return the exit status."""
        interrupted = False
        try:
            with self.bars:
                run(on_end=self.end, poll=self.poll)
        except KeyboardInterrupt:
            interrupted = True
            self.bars.console.print("Interrupted; the same command resumes from here.")
        failed = (o for o in self.outcomes if o.error)
        status = _print_failures(o for o in failed if not o.folder.status().given_up)
        return INTERRUPTED if interrupted else status

    def poll(self, here: list[RunFolder], elsewhere: list[RunFolder]) -> None:
        """Read the progress of these runs, and of those that other processes are running."""
        for run in here + elsewhere:
            if run not in self._tasks:
                self._tasks[run] = self.bars.add_task(run.title, total=1, text="starting")
                if run in elsewhere:
                    self._print(f"{run.title}: another process is running it")
            if not (status := run.status()).text:
                continue
            self._warn(run)
            self.bars.update(self._tasks[run], completed=status.share, text=status.text)
            if self._domains.setdefault(run, 0) < status.domains < status.of_domains:
                domain = f"domain {status.domains}/{status.of_domains}"
                self._print(f"{run.title}: {domain}, A_t {100 * (status.accuracy or 0):.2f} %")
                self._domains[run] = status.domains
        shares = (task.completed for task in self.bars.tasks if task.id in self._tasks.values())
        self.bars.update(self._all, completed=len(self.outcomes) + sum(shares))

    def end(self, outcome: Outcome) -> None:
        """Record that a run has ended."""
        self.outcomes.append(outcome)
        self._warn(outcome.folder)
        self.bars.update(self._all, completed=len(self.outcomes))
        if outcome.folder in self._tasks:
            self.bars.remove_task(self._tasks.pop(outcome.folder))
        result = outcome.result
        if result is not None:
            accuracy, seconds = 100 * result.average_accuracy, sum(result.train_seconds)
            line = f"{outcome.folder.title}: A_T {accuracy:.2f} %, {seconds:.1f} s"
            self._print(line + " (cached)" * outcome.cached)
        elif outcome.folder.status().given_up and not outcome.cached:
            self._print(f"{outcome.folder.title}: {outcome.error}")

    def _warn(self, run: RunFolder) -> None:
        """Print the warnings about a run's data that were not printed before."""
        for sentence in run.data_warnings():
            if sentence not in self._warned:
                self._warned.add(sentence)
                warnings.warn(sentence, stacklevel=1)

    def _print(self, line: str) -> None:
        """Print a line, unless there are bars."""
        if self.bars.disable:
            self.bars.console.print(line, soft_wrap=True, markup=False)


def _print_failures(failures: Iterable[Outcome]) -> int:
    """Print one sentence per error, which several runs may share, and return the exit status."""
    by_error: dict[str, list[RunFolder]] = defaultdict(list)
    status = 0
    for failure in failures:
        by_error[str(failure.error)].append(failure.folder)
        status = max(status, BAD_INPUT if failure.bad_input else 1)
    for error, (first, *others) in by_error.items():
        more = f" (and {len(others)} other run{'s' * (len(others) > 1)})" if others else ""
        see = f"; see {first.log_file}" if first.log_file.exists() else ""
        typer.echo(f"covon: {first.title}{more}: {error}{see}", err=True)
    return status
