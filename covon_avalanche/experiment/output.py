"""What the processes of a command print. Nothing here imports torch."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

from covon_avalanche.safe_text import printable


def prepare_output() -> None:
    """Continue without output when the reader of a pipe, such as ``head``, exits. Print warnings as
    one sentence each, without file and line; none about deprecated functions, nor those of
    Avalanche."""
    for name in ("stdout", "stderr"):
        text = getattr(sys, name)
        if isinstance(text, TextIOWrapper) and not text.isatty():
            with suppress(OSError):  # it is no file
                pipe = BufferedWriter(_Pipe(text.fileno(), "w", closefd=False))
                text = TextIOWrapper(pipe, text.encoding, text.errors, line_buffering=True)
                setattr(sys, name, text)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    warnings.showwarning = _print_warning


class _Pipe(FileIO):
    """Discards what nobody reads any more."""

    def write(self, data: Any, /) -> int:
        with suppress(BrokenPipeError):
            return super().write(data)
        return len(data)


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {printable(str(message))}", file=sys.stderr)
