"""The ranges that a search tries, and what it has found. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from covon_avalanche.experiment.registry.base import StrategySettings, Table
from covon_avalanche.experiment.result import first_error

_TWO_DECADES = 99.9


class Space(Table):
    """Values of a setting to search: from ``low`` to ``high`` on a logarithmic scale, or among
    ``choices``."""

    low: float | None = None
    high: float | None = None
    choices: Annotated[list[Any], Field(min_length=1)] | None = None

    @property
    def ends(self) -> list[Any]:
        """The choices, or the smallest and the largest value."""
        return self.choices or [self.low, self.high]

    @model_validator(mode="after")
    def _ordered(self) -> Space:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if len(bounds) != (2 if self.choices is None else 0):
            raise ValueError("give either low and high, or choices")
        if bounds and not 0 < bounds[0] < bounds[1]:
            raise ValueError(f"give 0 < low < high, or choices, got {self.low} and {self.high}")
        return self

    def includes(self, value: Any) -> bool:
        """Whether a search may try a value."""
        if self.choices is not None:
            return value in self.choices
        low, high = self.ends
        return isinstance(value, int | float) and bool(low <= value <= high)

    def at(self, share: float) -> Any:
        """The choice or, with four significant digits, the value at a share in [0, 1] of the
        range."""
        if self.choices is not None:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        low, high = self.ends
        return min(max(rounded(low * (high / low) ** share), low), high)

    @property
    def text(self) -> str:
        """``LOW to HIGH``, or the choices, separated by commas."""
        if self.choices is not None:
            return ", ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}"

    def has_at_end(self, value: Any) -> bool:
        """Whether a value is in the outer tenths of a range or outside (the recipe's own may be),
        or is the first or the last of at least three numeric choices in order."""
        if self.choices is not None:
            numbers = [v for v in self.choices if isinstance(v, int | float)]
            ordered = len(numbers) == len(self.choices) > 2 and numbers == sorted(numbers)
            return ordered and value in (numbers[0], numbers[-1])
        if not self.includes(value):
            return isinstance(value, int | float)
        low, high = self.ends
        return not 0.1 <= math.log(value / low) / math.log(high / low) <= 0.9


class Searched(Table):
    """How a search has chosen the settings of a strategy."""

    trials: int | None = None
    """Those that are finished; ``None`` in recipes of earlier versions."""
    extensions: int = 0
    """Of these, how many are more than were asked for, because the grid was extended."""
    accuracy: float | None = None
    """A_T of the best on validation images."""
    ranges: dict[str, str] = Field(default_factory=dict)
    """What was tried, by setting: ``LOW to HIGH``, or the choices."""
    at_end: list[str] = Field(default_factory=list)
    """Settings whose best value is at an end of their range, or none of their choices."""


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def flat_settings(settings: StrategySettings) -> dict[str, Any]:
    """Values by key, including those of tables as ``merge.KEY`` and ``arguments.KEY``."""
    whole = settings.model_dump()
    tables = {name: own for name, own in whole.items() if isinstance(own, dict)}
    return whole | {f"{name}.{k}": v for name, own in tables.items() for k, v in own.items()}


def accepted(settings: StrategySettings, key: str, value: Any) -> Any:
    """The value as the setting takes it: 50.0 becomes 50 where the recipe has a whole number.

    :raises ValidationError: if the setting does not take it.
    """
    is_float = isinstance(flat_settings(settings)[key], float)
    if isinstance(value, float) and value.is_integer() and not is_float:
        with suppress(ValidationError):
            return _validated(settings, key, int(value))
    return _validated(settings, key, value)


def _validated(settings: StrategySettings, key: str, value: Any) -> Any:
    whole = settings.model_dump()
    name, dot, own = key.partition(".")
    table, name = (whole[name], own) if dot else (whole, name)
    table[name] = value
    return flat_settings(type(settings).model_validate(whole))[key]


def default_space(settings: StrategySettings) -> dict[str, Space]:
    """From a tenth of each searched setting to ten times it, or to its upper bound; without those
    that a schedule sets from the first task on."""
    known = settings.model_dump()
    first_task = (known.get("schedule") or [{}])[0]
    return {
        key: Space(
            low=rounded(value / 10), high=min(rounded(10 * value), settings.upper_bound(key))
        )
        for key, value in known.items()
        if isinstance(value, float) and value > 0 and settings.is_searched(key)
        if first_task.get(key) is None
    }


def check_space(name: str, settings: StrategySettings, space: Mapping[str, Space]) -> None:
    """Check the ranges of a strategy.

    :raises ValueError: if it has no such setting, if a schedule sets it from the first task on, if
        the setting does not take a value of the range, or if the range of the learning rate is too
        small.
    """
    known = flat_settings(settings)
    first_task = (known.get("schedule") or [{}])[0]
    for key, values in space.items():
        if key not in known or key == "kind":
            raise ValueError(
                f"{name}.{key}: {name} has no such setting; known are {', '.join(known)}"
            )
        if first_task.get(key) is not None:
            raise ValueError(f"{name}.{key} cannot be searched: the schedule of {name} sets it")
        for value in values.ends:
            try:
                accepted(settings, key, value)
            except ValidationError as error:
                raise ValueError(f"{name}.{key}: {value!r}: {first_error(error)}") from error
        if key == "lr" and not (values.low or 0.0) * _TWO_DECADES < (values.high or 0.0):
            raise ValueError(
                f"{name}.lr: a learning rate needs low and high, at least two decades apart, got "
                f"{values.text}"
            )
