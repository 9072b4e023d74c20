"""A grid of runs in a pool of local processes. Nothing here imports torch."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Epoch, Result
from covon_avalanche.experiment.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    strategy: str
    seed: int


def jobs_of(recipe: Recipe) -> list[Job]:
    """All runs of a recipe, seed by seed."""
    return [Job(strategy, seed) for seed in recipe.seeds for strategy in recipe.strategies]


@dataclass(frozen=True)
class Event:
    """What happened to a job: an epoch, another domain learned, its end, or a failure."""

    job: Job
    domains: int = 0
    accuracy: float | None = None
    """Mean over the domains learned, where another one was."""
    epoch: Epoch | None = None
    epochs: int = 0
    """Of the domain that ``epoch`` belongs to."""
    result: Result | None = None
    error: str | None = None
    bad_input: bool = False
    """Whether the error is in what the user gave: data, settings, folders."""
    log: Path | None = None
    """Where the traceback is, if the run came as far as its folder."""


def run_grid(
    recipe: Recipe,
    jobs: list[Job],
    folder: Path,
    *,
    processes: int,
    dataset_root: str | None = None,
    notify: Callable[[Event], None] = lambda event: None,
    options: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Run all jobs, one thread each; every finished one has written its result file.

    What is finished already is not run again, what was interrupted goes on. A job that fails
    does not stop the others; what it raised comes as an event. When a process dies (killed for
    want of memory, say), the jobs that ran then go on one at a time until one of them dies
    again: that one has failed.

    :param folder: of all runs, see :class:`RunFolder`.
    :param processes: how many runs at a time.
    :param notify: called in this process for each event.
    :param options: more arguments of :func:`run_in_folder`.
    :return: the results of the jobs that did not fail, in the order of the jobs.
    """
    results = _finished(recipe, jobs, folder)
    for job, result in results.items():
        notify(Event(job, recipe.stream.n_experiences, result=result))
    missing = [job for job in jobs if job not in results]
    work = partial(
        _work, recipe, folder=folder, dataset_root=dataset_root, options=dict(options or {})
    )

    def tell(event: Event) -> None:
        if event.result is not None:
            results[event.job] = event.result
        notify(event)

    with _ctrl_c() as pressed:
        while missing:
            stopped = _run_pool(missing, work, folder, processes, tell, pressed)
            for i, job in enumerate(stopped):
                if _run_pool([job], work, folder, 1, tell, pressed):
                    reason = "its process died twice, alone too; perhaps for want of memory"
                    tell(Event(job, error=reason))
                    missing[:0] = stopped[i + 1 :]  # it was this one
                    break
    return [results[job] for job in jobs if job in results]


def _finished(recipe: Recipe, jobs: list[Job], folder: Path) -> dict[Job, Result]:
    """Results that can be used as they are. One stored under names that the recipe no longer has
    is left to a worker, which writes it anew while it holds the folder's lock."""
    found = {}
    for job in jobs:
        run = RunFolder(folder, recipe, job.strategy, job.seed)
        result = run.result()
        if result is not None and result == run.under_names_of_today(result):
            found[job] = result
    return found


def _run_pool(
    waiting: list[Job],
    work: Callable[[Job], Event],
    folder: Path,
    processes: int,
    notify: Callable[[Event], None],
    pressed: Callable[[], bool],
) -> list[Job]:
    """Take jobs and run them until none waits, or until a process dies.

    :return: the jobs that ran when a process died, which end with it.
    """
    stopped: list[Job] = []
    broken = False
    futures: dict[Future[Event], Job] = {}
    with _pool(min(processes, len(waiting)), folder) as (pool, messages):
        while futures or (waiting and not broken):
            if pressed():
                raise KeyboardInterrupt
            try:
                while waiting and len(futures) < processes and not broken:
                    future = pool.submit(work, waiting[0])
                    futures[future] = waiting.pop(0)
            except BrokenProcessPool:
                broken = True
            running = set(futures.values())
            for event in _drain(messages):
                if event.job in running:  # a message may arrive later than the result
                    notify(event)
            for future in [f for f in futures if f.done()]:
                job = futures.pop(future)
                try:
                    notify(future.result())
                except BrokenProcessPool:
                    broken = True
                    stopped.append(job)
    return stopped


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, to be asked for where stopping is safe: an exception that
    Python raises by itself may be lost, in a callback or a destructor."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's business
        return
    seen = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: seen.set())
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _pool(processes: int, folder: Path) -> Iterator[tuple[ProcessPoolExecutor, Queue[Event]]]:
    context = multiprocessing.get_context("spawn")
    messages: Queue[Event] = context.Queue()
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(messages,))
    workers: list[Any] = []
    try:
        yield pool, messages
        workers = list((pool._processes or {}).values())
        pool.shutdown()
    except BaseException:  # Ctrl-C: whole files only, so the workers may go at once
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
        raise
    finally:
        _remove_parts(folder, [worker.pid for worker in workers if worker.exitcode])
        messages.close()
        messages.cancel_join_thread()


def _remove_parts(folder: Path, processes: list[int]) -> None:
    """What processes have left that were stopped while writing."""
    for process in processes:
        for part in folder.rglob(f".*.{process}.part"):
            part.unlink(missing_ok=True)


def _drain(messages: Queue[Event]) -> Iterator[Event]:
    """The waiting messages; waits a moment where there are none."""
    try:
        while True:
            yield messages.get_nowait()
    except queue.Empty:
        time.sleep(0.05)


# In the worker processes ---------------------------------------------------------------

_messages: Queue[Event]


def end_with_parent() -> None:
    """Let this worker end when the process that started it is killed, which could not tell it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _start(messages: Queue[Event]) -> None:
    global _messages
    _messages = messages
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    import torch

    torch.set_num_threads(1)


def _work(
    recipe: Recipe, job: Job, folder: Path, dataset_root: str | None, options: dict[str, Any]
) -> Event:
    """How it ended. An exception would not always arrive: its class may be known here only."""
    try:
        result = run_job(recipe, job, folder, dataset_root, options, _messages.put)
    except (Exception, SystemExit) as error:
        text, bad_input = sentence_of(error)
        log = RunFolder(folder, recipe, job.strategy, job.seed).log_file
        return Event(job, error=text, bad_input=bad_input, log=log if log.exists() else None)
    return Event(job, len(result.accuracy), result=result)


def sentence_of(error: BaseException) -> tuple[str, bool]:
    """What an error says, and whether it is in what the user gave."""
    bad_input = isinstance(error, ValueError | OSError)
    name = "" if bad_input else f"{type(error).__name__}: "
    return name + (" ".join(str(error).split()) or "no reason given"), bad_input


def run_job(
    recipe: Recipe,
    job: Job,
    folder: Path,
    dataset_root: str | None,
    options: dict[str, Any],
    notify: Callable[[Event], None] = lambda event: None,
) -> Result:
    """One run of a grid, in this process."""
    from covon_avalanche.experiment.run import run_in_folder

    return run_in_folder(
        recipe,
        job.strategy,
        job.seed,
        folder,
        dataset_root=dataset_root,
        progress=lambda domains, accuracy: notify(Event(job, domains, accuracy)),
        watch=lambda epoch, n: notify(Event(job, epoch.experience, epoch=epoch, epochs=n)),
        **options,
    )
