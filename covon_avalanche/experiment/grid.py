"""Many runs in a pool of local processes. Nothing here imports torch in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import RunFolder, error_sentence
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import worker_pool

_POLL_SECONDS = 0.2


class RunSpec(NamedTuple):
    """One run of a recipe."""

    strategy: str
    seed: int


def specs_of(recipe: Recipe) -> list[RunSpec]:
    """All runs of a recipe, seed by seed."""
    return [RunSpec(strategy, seed) for seed in recipe.seeds for strategy in recipe.strategies]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result or an error."""

    spec: RunSpec
    result: Result | None = None
    error: str | None = None
    bad_input: bool = False
    """Whether the error is in what the user gave: data, settings, folders."""
    log: Path | None = None
    """Where the traceback is, if the run came as far as its folder."""


def run_grid(
    recipe: Recipe,
    specs: Sequence[RunSpec],
    runs: Path,
    options: RunOptions = RunOptions(),
    *,
    processes: int = 1,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    poll: Callable[[list[RunSpec]], None] = lambda running: None,
) -> list[Result]:
    """Run all specs; every finished run has written its result file.

    Finished runs are not repeated, interrupted ones are resumed. A run that fails does not stop
    the others. When a process dies (killed by the system for lack of memory, say), the runs of
    that moment are retried one at a time until one of them dies again: that one has failed.

    :param runs: folder of all runs, see :class:`RunFolder`.
    :param processes: number of parallel runs.
    :param on_end: called in this process when a run has ended.
    :param poll: called in this process several times a second with the runs in progress.
    :return: the results of the runs that did not fail, in the order of the specs.
    """
    grid = _Grid(recipe, runs, options, on_end, poll)
    waiting = [spec for spec in specs if not grid.is_finished(spec)]
    with _interrupted() as grid.interrupted:
        while waiting:
            died = grid.run(waiting, processes)
            for i, spec in enumerate(died):
                if grid.run([spec], 1):
                    grid.died_twice(spec)
                    waiting[:0] = died[i + 1 :]
                    break
    return [grid.results[spec] for spec in specs if spec in grid.results]


@dataclass
class _Grid:
    recipe: Recipe
    runs: Path
    options: RunOptions
    on_end: Callable[[Outcome], None]
    poll: Callable[[list[RunSpec]], None]
    interrupted: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.results: dict[RunSpec, Result] = {}

    def folder(self, spec: RunSpec) -> RunFolder:
        return RunFolder(self.runs, self.recipe, *spec)

    def is_finished(self, spec: RunSpec) -> bool:
        """A result under earlier names is left to a worker, which locks the folder."""
        folder = self.folder(spec)
        result = folder.result()
        if result is None or not folder.is_named_as(result):
            return False
        self.end(Outcome(spec, result))
        return True

    def end(self, outcome: Outcome) -> None:
        if outcome.result is not None:
            self.results[outcome.spec] = outcome.result
        self.on_end(outcome)

    def died_twice(self, spec: RunSpec) -> None:
        error = "its process died twice, alone too; perhaps for lack of memory"
        self.folder(spec).write_failure(error)
        self.end(Outcome(spec, error=error))

    def run(self, waiting: list[RunSpec], processes: int) -> list[RunSpec]:
        """Take specs and run them until none waits, or until a process dies.

        :return: the runs that were in progress when a process died.
        """
        died: list[RunSpec] = []
        broken = False
        running: dict[Future[Outcome], RunSpec] = {}
        try:
            with worker_pool(min(processes, len(waiting))) as pool:
                while running or (waiting and not broken):
                    if self.interrupted():
                        raise KeyboardInterrupt
                    try:
                        while waiting and len(running) < processes and not broken:
                            spec = waiting[0]
                            task = (self.recipe, spec, self.runs, self.options)
                            running[pool.submit(_run, *task)] = spec
                            waiting.pop(0)
                    except BrokenProcessPool:
                        broken = True
                    done = wait(running, _POLL_SECONDS, FIRST_COMPLETED).done
                    self.poll(list(running.values()))
                    for future in done:
                        spec = running.pop(future)
                        try:
                            self.end(future.result())
                        except BrokenProcessPool:
                            broken = True
                            died.append(spec)
        finally:
            for spec in [*running.values(), *died]:
                self.folder(spec).remove_partial_files()
        return died


@contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, asked for where stopping is safe: a KeyboardInterrupt that
    Python raises in a callback or destructor would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _run(recipe: Recipe, spec: RunSpec, runs: Path, options: RunOptions) -> Outcome:
    """In a worker. Errors are returned as text, because unpickling an exception may fail."""
    try:
        from covon_avalanche.experiment.run import run_in_folder

        return Outcome(spec, run_in_folder(recipe, *spec, runs, options))
    except (Exception, SystemExit) as error:
        text, bad_input = error_sentence(error)
        log = RunFolder(runs, recipe, *spec).log_file
        return Outcome(spec, error=text, bad_input=bad_input, log=log if log.exists() else None)
