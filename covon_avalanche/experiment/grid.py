"""A grid of runs in a pool of local processes. Nothing here imports torch."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Event:
    """What happened to a job: an epoch, another domain learned, its end, or a failure."""

    job: Job
    domains: int = 0
    epoch: Epoch | None = None
    epochs: int = 0
    """Of the domain that ``epoch`` belongs to."""
    result: Result | None = None
    error: str | None = None
    bad_input: bool = False
    """Whether the error is in what the user gave: data, settings, folders."""


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
    does not stop the others; what it raised comes as an event.

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
    if missing:
        results |= _run_missing(
            recipe, missing, folder, processes, dataset_root, notify, dict(options or {})
        )
    return [results[job] for job in jobs if job in results]


def _finished(recipe: Recipe, jobs: list[Job], folder: Path) -> dict[Job, Result]:
    stored = {job: RunFolder(folder, recipe, job.strategy, job.seed).result() for job in jobs}
    return {job: result for job, result in stored.items() if result is not None}


def _run_missing(
    recipe: Recipe,
    jobs: list[Job],
    folder: Path,
    processes: int,
    dataset_root: str | None,
    notify: Callable[[Event], None],
    options: dict[str, Any],
) -> dict[Job, Result]:
    results: dict[Job, Result] = {}
    processes = min(processes, len(jobs))
    with _no_parts_left(folder), _pool(processes) as (pool, messages), _ctrl_c() as pressed:
        futures: dict[Future[Result], Job] = {
            pool.submit(_work, recipe, job, folder, dataset_root, options): job for job in jobs
        }
        while futures:
            if pressed():
                raise KeyboardInterrupt
            running = set(futures.values())
            for event in _drain(messages):
                if event.job in running:  # a message may arrive later than the result
                    notify(event)
            for future in [f for f in futures if f.done()]:
                job = futures.pop(future)
                error = future.exception()
                if error is None:
                    results[job] = future.result()
                    notify(Event(job, recipe.stream.n_experiences, result=results[job]))
                else:
                    notify(_failure(job, error))
    return results


def _failure(job: Job, error: BaseException) -> Event:
    """One sentence about it."""
    bad_input = isinstance(error, ValueError | OSError)
    name = "" if bad_input else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or "no reason given"
    return Event(job, error=name + text, bad_input=bad_input)


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
def _no_parts_left(folder: Path) -> Iterator[None]:
    """Remove what a worker that was stopped while writing has left."""
    try:
        yield
    except BaseException:
        for part in folder.rglob(".*.part"):
            part.unlink()
        raise


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Queue[Event]]]:
    context = multiprocessing.get_context("spawn")
    messages: Queue[Event] = context.Queue()
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(messages,))
    try:
        yield pool, messages
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
        messages.close()
        messages.cancel_join_thread()


def _drain(messages: Queue[Event]) -> Iterator[Event]:
    """The waiting messages; waits a moment where there are none."""
    try:
        while True:
            yield messages.get_nowait()
    except queue.Empty:
        time.sleep(0.05)


# In the worker processes ---------------------------------------------------------------

_messages: Queue[Event]


def _start(messages: Queue[Event]) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    import torch

    torch.set_num_threads(1)


def _work(
    recipe: Recipe, job: Job, folder: Path, dataset_root: str | None, options: dict[str, Any]
) -> Result:
    return run_job(recipe, job, folder, dataset_root, options, _messages.put)


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
        progress=lambda domains, _: notify(Event(job, domains)),
        watch=lambda epoch, n: notify(Event(job, epoch.experience, epoch=epoch, epochs=n)),
        **options,
    )
