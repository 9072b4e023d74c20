"""Settings without their tables: values by dotted name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name; lists stay whole, and what is not set is left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def common_leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's settings that are not of its strategy."""
    return leaves({key: value for key, value in settings.items() if key != "strategy"})


def differing(each: Sequence[Mapping[str, Any]]) -> list[str]:
    """``key=value, key=value`` for each of several leaves: what they do not share."""
    texts = [{key: _text(value) for key, value in one.items()} for one in each]
    keys = dict.fromkeys(key for one in texts for key in one)
    apart = [key for key in keys if len({one.get(key) for one in texts}) > 1]
    return [", ".join(f"{key}={one[key]}" for key in apart if key in one) for one in texts]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, sort_keys=True, default=str)
