"""Errors that end a run, and warnings, as one sentence each. Nothing here imports torch."""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import suppress
from typing import Any

from covon_avalanche.safe_text import printable


def is_bad_input(error: BaseException) -> bool:
    """Whether the user's input caused an error: data, settings, folders."""
    return isinstance(error, ValueError | OSError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, in Python, numpy or torch, on any device."""
    texts = "out of memory", "can't allocate memory"  # the second on the CPU
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def error_sentence(error: BaseException) -> str:
    """The message of an error, with its class unless the user's input caused it."""
    name = "" if is_bad_input(error) else f"{type(error).__name__}: "
    text = re.sub(r"^\[Errno \d+\] ", "", printable(str(error)))
    return name + (text or "no reason given")


def run_error(error: BaseException) -> str:
    """The message of an error that ends a run, with advice where memory is short, or where batch
    norm has a single image."""
    advice = ""
    if is_out_of_memory(error):
        advice = "; try a smaller train_mb_size or eval_mb_size, or --jobs 1"
    elif "more than 1 value per channel" in str(error):
        advice = "; the last batch of a domain has a single image: choose another train_mb_size"
    return error_sentence(error) + advice


def shorten_warnings() -> None:
    """Print warnings as one sentence each, without file and line; none about deprecated functions,
    nor those of Avalanche."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    warnings.showwarning = _print_warning


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    with suppress(OSError):  # its reader has exited
        print(f"warning: {printable(str(message))}", file=sys.stderr)
