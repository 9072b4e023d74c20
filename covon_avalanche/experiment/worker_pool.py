"""A pool of processes for runs and searches. Nothing here imports torch in this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def default_processes(device: str) -> int:
    """One per core that this process may use, or one on an accelerator, because several would share
    its memory."""
    from joblib import cpu_count

    return cpu_count() if device == "cpu" else 1


@contextmanager
def worker_pool(
    processes: int, on_terminate: _Handler = signal.SIG_DFL
) -> Iterator[ProcessPoolExecutor]:
    """Spawned processes with one thread each, which end when this process is killed.

    After an exception such as KeyboardInterrupt they are terminated at once.

    :param on_terminate: their handler of SIGTERM.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        processes, context, initializer=_start_worker, initargs=(on_terminate,)
    )
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(10)
            worker.kill()
        raise


def _start_worker(on_terminate: _Handler) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, on_terminate)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    import torch

    torch.set_num_threads(1)


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
