"""Hooks on the submodules of a network, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def module_hooks() -> Iterator[ExitStack]:
    """For hooks that are registered inside, and entered into what this yields: at the end they are
    removed. Networks run uncompiled inside, because code that ``torch.compile`` has made does not
    call hooks that were added later."""
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        yield hooks
