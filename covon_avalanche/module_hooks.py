"""Hooks on the submodules of a network, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch


@contextmanager
def module_hooks() -> Iterator[ExitStack]:
    """For hooks that are registered inside, and entered into what this yields: at the end they are
    removed. Networks run uncompiled inside, because code that ``torch.compile`` has made does not
    call hooks that were added later; but not if the caller itself is being compiled, hooks
    included."""
    with ExitStack() as hooks:
        if not torch.compiler.is_compiling():
            with suppress(RuntimeError):  # raised in what torch.compile has split into parts
                hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield hooks
