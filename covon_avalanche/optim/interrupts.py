"""Ctrl-C between operations instead of within them."""

from __future__ import annotations

import threading
from _signal import SIGINT, getsignal, signal  # the signal module is slow: it converts to enums
from types import FrameType, TracebackType
from typing import Any


class defer_interrupt:
    """Context manager: Ctrl-C inside of it takes effect at the end.

    Threads other than the main thread never receive signals. Handlers that are not Python
    functions are left unchanged.
    """

    def __enter__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = getsignal(SIGINT)
            if callable(handler):
                self._handler = handler
                signal(SIGINT, self._defer)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            signal(SIGINT, self._handler)
            if self._pending is not None:
                self._handler(*self._pending)
