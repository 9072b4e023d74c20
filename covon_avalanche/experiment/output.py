"""What the processes of a command print. Nothing here imports torch."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from covon_avalanche.safe_text import printable


def print_short_warnings() -> None:
    """Print warnings as one sentence each, without file and line; none about deprecated functions,
    nor those of Avalanche."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    warnings.showwarning = _print_warning


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {printable(str(message))}", file=sys.stderr)
