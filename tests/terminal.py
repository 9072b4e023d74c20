"""Commands, in the process of a test or as a terminal starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from covon_avalanche.cli import app


def covon(*arguments: object, **options: Any) -> Result:
    """Run ``covon`` with these arguments, without a process of its own."""
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


def wait_until(condition: Callable[[], object], seconds: float = 120) -> bool:
    """Wait until something is true, at most this long; whether it became true."""
    deadline = time.monotonic() + seconds
    while not (is_true := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_true


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
