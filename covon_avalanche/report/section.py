"""Results that may be compared with each other: of one recipe, all that is common set alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import decisive, settings_today
from covon_avalanche.report.leaves import common_leaves, differing, leaves
from covon_avalanche.report.standing import Standing, best, by_accuracy
from covon_avalanche.report.statistics import p_against


@dataclass(frozen=True)
class Section:
    """The strategies of one recipe, in order of first appearance."""

    recipe: str
    slug: str
    """Of letters, digits and hyphens, unique in a report."""
    title: str
    """What the recipe calls itself, and what tells it from others of that title."""
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
    def domains(self) -> list[str]:
        """Names of the domains, in the order they are learned; numbers if they have none."""
        names = self.settings.get("stream", {}).get("domains", [])
        learned = len(self.runs[0].accuracy)
        return [str(n) for n in (names if len(names) == learned else range(1, learned + 1))]

    @property
    def tested(self) -> list[str]:
        """Names of the domains that are tested on; numbers if these are never learned."""
        first = self.runs[0]
        if first.held_out or len(self.domains) != len(first.counts):
            return [str(n) for n in range(1, len(first.counts) + 1)]
        return self.domains

    @property
    def seeds(self) -> list[int]:
        """Of any run."""
        return sorted({run.seed for run in self.runs})

    @property
    def same_seeds(self) -> bool:
        """Whether all continual learners were run with the same seeds."""
        return len({tuple(s.seeds) for s in self.in_order if not s.ceiling}) <= 1

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
    """One section per recipe, what is evaluated, and settings but those of the strategies, in
    order of first appearance.

    :raises ValueError: if there are no results.
    :raises ResultError: if two are of the same run.
    """
    if not results:
        raise ValueError("a report needs at least one result, got none")
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_key(_common(result)), []).append(result)
    firsts = [runs[0] for runs in groups.values()]
    slugs = unique_slugs([first.recipe for first in firsts])
    names = [str(first.settings.get("title", first.recipe)) for first in firsts]
    titles = _told_apart(names, [_common(first) for first in firsts], "{} ({})")
    return [
        Section(runs[0].recipe, slug, title, tuple(_standings(runs)))
        for slug, title, runs in zip(slugs, titles, groups.values(), strict=True)
    ]


def _common(result: Result) -> dict[str, Any]:
    """What the results of a section share."""
    common = common_leaves(decisive(settings_today(result.settings)))
    return {"recipe": result.recipe, "evaluated": result.stream, **common}


def _own(result: Result) -> dict[str, Any]:
    """What the results of a row share."""
    return leaves(settings_today(result.settings)["strategy"])


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _told_apart(
    names: Sequence[str], settings: Sequence[dict[str, Any]], form: str
) -> Iterator[str]:
    """Names; those that are equal with the settings that are not."""
    for name, mine in zip(names, settings, strict=True):
        same = [other for n, other in zip(names, settings, strict=True) if n == name]
        text = differing(same)[same.index(mine)]
        yield form.format(name, text) if text else name


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


def _standings(results: Sequence[Result]) -> list[Standing]:
    """One per strategy and its settings."""
    rows: dict[tuple[str, str], dict[int, Result]] = {}
    for result in results:
        runs = rows.setdefault((result.strategy, _key(_own(result))), {})
        if result.seed in runs:
            raise ResultError(
                f"a strategy must have one result per seed, got two of {result.strategy!r} with "
                f"seed {result.seed} in recipe {result.recipe!r} and the same settings"
            )
        runs[result.seed] = result
        first = next(iter(runs.values()))
        if len(result.accuracy) != len(first.accuracy) or len(result.counts) != len(first.counts):
            raise ResultError(
                f"a strategy's runs must have the same domains, got {len(first.accuracy)} and "
                f"{len(result.accuracy)} of {result.strategy!r} in recipe {result.recipe!r}"
            )
    settings = [_own(next(iter(runs.values()))) for runs in rows.values()]
    names = _told_apart([name for name, _ in rows], settings, "{}, {}")
    return [
        Standing(name, tuple(runs[seed] for seed in sorted(runs)))
        for name, runs in zip(names, rows.values(), strict=True)
    ]
