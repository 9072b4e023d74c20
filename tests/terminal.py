"""A command as a terminal starts it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def in_a_terminal(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The leader of a process group of its own, which listens to Ctrl-C even where the tests
    themselves run in the background of a shell and do not; killed at the end."""

    def listen() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    )
    with process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
