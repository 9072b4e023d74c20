"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of an error: ``; did you mean NAME?``, or nothing if no known name is similar."""
    names = {k.casefold(): k for k in known if isinstance(k, str)}
    close = get_close_matches(str(name).casefold(), names, n=1, cutoff=0.55)
    return f"; did you mean {names[close[0]]}?" if close else ""
