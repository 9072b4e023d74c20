"""Results that may be compared with each other: one recipe on one stream."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from covon_avalanche.experiment.reporting.standing import Standing, best, by_accuracy
from covon_avalanche.experiment.reporting.statistics import p_against
from covon_avalanche.experiment.result import Result


@dataclass(frozen=True)
class Section:
    """The strategies of one recipe, in order of first appearance."""

    recipe: str
    slug: str
    """Of letters, digits and hyphens, unique in a report."""
    in_order: tuple[Standing, ...]

    @property
    def runs(self) -> list[Result]:
        """All of them."""
        return [run for standing in self.in_order for run in standing.runs]

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe of the first run."""
        return self.runs[0].settings

    @property
    def evaluated(self) -> str:
        """``test`` or ``valid``."""
        return self.runs[0].stream

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return str(self.settings.get("stream", {}).get("name", "unknown stream"))

    @property
    def title(self) -> str:
        """What the recipe calls itself."""
        return str(self.settings.get("title", self.recipe))

    @property
    def domains(self) -> list[str]:
        """Names of the domains, in the order they are learned; numbers if they have none."""
        names = self.settings.get("stream", {}).get("domains", [])
        learned = len(self.runs[0].accuracy)
        return [str(n) for n in (names if len(names) == learned else range(1, learned + 1))]

    @property
    def tested(self) -> list[str]:
        """Names of the domains that are tested on."""
        count = len(self.runs[0].counts)
        return self.domains if len(self.domains) == count else [str(n + 1) for n in range(count)]

    @property
    def seeds(self) -> list[int]:
        """Of any run."""
        return sorted({run.seed for run in self.runs})

    @cached_property
    def standings(self) -> list[Standing]:
        """Highest A_T first."""
        return by_accuracy(self.in_order)

    @cached_property
    def best(self) -> Standing | None:
        """The highest A_T, ceilings aside."""
        return best(self.in_order)

    @cached_property
    def best_without_replay(self) -> Standing | None:
        """The highest A_T without replay, ceilings aside."""
        return best(self.in_order, among=lambda standing: not standing.replay)

    @cached_property
    def p_values(self) -> dict[str, float]:
        """Of the strategies that could be tested against the best one, ceilings aside."""
        if self.best is None:
            return {}
        others = [s for s in self.in_order if not s.ceiling and s is not self.best]
        return p_against(self.best, others)


def sections_of(results: Sequence[Result]) -> list[Section]:
    """One section per recipe and stream, in order of first appearance.

    :raises ValueError: if there are no results, or two of the same strategy and seed.
    """
    if not results:
        raise ValueError("a report needs at least one result, got none")
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        stream = json.dumps(_what_is_set(result), sort_keys=True, default=str)
        groups.setdefault((result.recipe, stream, result.stream), []).append(result)
    slugs = unique_slugs([recipe for recipe, *_ in groups])
    return [
        Section(recipe, slug, tuple(_standings(recipe, runs)))
        for slug, ((recipe, *_), runs) in zip(slugs, groups.items(), strict=True)
    ]


def _what_is_set(result: Result) -> dict[str, Any]:
    """The stream's settings without those that are not set: there may be new ones since."""
    stream = result.settings.get("stream") or {}
    return {key: value for key, value in stream.items() if value is not None}


def unique_slugs(names: Sequence[str]) -> list[str]:
    """Names for files and anchors: letters, digits and hyphens, numbered where they are equal."""
    slugs: list[str] = []
    for name in names:
        slug = first = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"
        number = 2
        while slug in slugs:
            slug, number = f"{first}-{number}", number + 1
        slugs.append(slug)
    return slugs


def _standings(recipe: str, results: Sequence[Result]) -> list[Standing]:
    by_name: dict[str, dict[int, Result]] = {}
    for result in results:
        runs = by_name.setdefault(result.strategy, {})
        if result.seed in runs:
            raise ValueError(
                f"a strategy must have one result per seed, got two of {result.strategy!r} with "
                f"seed {result.seed} in recipe {recipe!r}"
            )
        runs[result.seed] = result
    return [
        Standing(name, tuple(runs[seed] for seed in sorted(runs))) for name, runs in by_name.items()
    ]
