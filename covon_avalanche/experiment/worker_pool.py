"""A pool of processes for runs and searches. Nothing here imports torch in this process."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

from covon_avalanche.experiment.run_errors import shorten_warnings

_T = TypeVar("_T")


def default_processes(device: str) -> int:
    """One per core that this process may use, or one per GPU, whose memory several would share."""
    if device == "cpu":
        from joblib import cpu_count

        return cpu_count()
    from torch import cuda  # only here, because it takes seconds

    return max(1, cuda.device_count()) if device == "cuda" else 1


class WorkerPool(ThreadPoolExecutor):
    """Spawned processes with one torch thread each, which take one task after another. A killed
    process fails only its own task, with ``BrokenProcessPool``. Leaving the context waits for all
    tasks; an exception such as KeyboardInterrupt kills the processes at once.

    Each thread sends its tasks to a process of its own, through a pipe. Pebble, loky and
    ``ProcessPoolExecutor`` leave semaphores in /dev/shm if all processes are killed, and go on
    if only the parent is; loky also fails all tasks if one process is killed.

    :param device: for ``"cuda"`` each process sees one GPU; more processes than GPUs share them.
    """

    def __init__(self, processes: int, device: str = "cpu") -> None:
        super().__init__(processes)
        self.device = device
        self.workers: list[tuple[BaseProcess, Connection]] = []
        self._of_thread = threading.local()
        self._numbers = count()
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        return super().submit(self._call, partial(function, *args, **kwargs))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.shutdown()
                for worker, pipe in self.workers:
                    pipe.close()
                    worker.join()
        finally:
            self.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._is_closed = True
            for worker, _ in self.workers:
                worker.kill()
            for worker, _ in self.workers:
                worker.join()

    def _call(self, task: Callable[[], _T]) -> _T:
        own = self._of_thread
        if not hasattr(own, "number"):
            own.number = next(self._numbers)
        if not hasattr(own, "pipe"):
            own.pipe = self._start(own.number)
        try:
            own.pipe.send(task)
            value, error = own.pipe.recv()
        except (EOFError, OSError):
            del own.pipe
            raise BrokenProcessPool("a worker process was killed") from None
        if error is not None:
            raise error
        return value

    def _start(self, number: int) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, self.device, number))
        resource_tracker.ensure_running()  # which would set another signal mask
        if hasattr(signal, "pthread_sigmask"):  # not on Windows
            # A process inherits the mask of its thread, and misses a Ctrl-C while it imports.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._lock:
            if self._is_closed:
                raise BrokenProcessPool("the pool is closed")
            worker.start()
            self.workers.append((worker, ours))
        theirs.close()
        return ours


def _work(pipe: Connection, device: str, number: int) -> None:
    """Do tasks from the pipe in a new process, until the pool closes it or its process ends; their
    errors must be picklable."""
    if device == "cuda":
        choose_gpu(number)  # before Avalanche may ask CUDA, which reads the variable once
    for library in ("OMP", "OPENBLAS", "MKL"):  # of scikit-learn, which is imported later
        os.environ[f"{library}_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.raiseExceptions = False  # no traceback for each line of a log on a full disk
    shorten_warnings()
    with suppress(EOFError):
        while True:
            task = pipe.recv()
            try:
                import_avalanche()
                import torch

                torch.set_num_threads(1)
                pipe.send((task(), None))
            except BaseException as error:
                pipe.send((None, error))


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def choose_gpu(number: int) -> None:
    """Show this process one of the GPUs that it may use, before it uses any."""
    import torch

    if (n := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number % n]


@cache
def ignore_imports_in_gc() -> None:
    """Exempt what a worker has imported from garbage collection, which precedes every run: half a
    million objects that stay take 0.3 s each time."""
    gc.collect()
    gc.freeze()


class _Later(ModuleType):
    """Stands in ``sys.modules`` for a module that is imported when it is used after that, or one
    of its functions is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # which Accelerate looks for

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self:
            return getattr(import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(self, name)(*args, **kwargs)


def import_avalanche() -> None:
    """Import Avalanche without the libraries that a logger, a metric and GEM need: W&B leaves
    temporary folders if its process is killed, torchmetrics takes a quarter of the time, and
    qpsolvers brings JAX where it was installed with all solvers. They are imported when they are
    used."""
    if "avalanche.evaluation.metrics" in sys.modules:
        return
    names = {"wandb", "torchmetrics", "torchmetrics.functional", "qpsolvers"} - sys.modules.keys()
    sys.modules.update({name: _Later(name) for name in names})
    try:
        import_module("avalanche.evaluation.metrics")
    finally:
        for name in names:
            del sys.modules[name]
