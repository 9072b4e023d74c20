"""Hyperparameters chosen on validation images, by the same protocol for every strategy.

1. The learning rate: five of them on a logarithmic grid over its range, in which the
   recipe's own takes the place of the nearest. While the best is at an end, the grid is extended
   by one, at most four times.
2. The remaining trials draw all searched settings, the learning rate within a step of the grid
   around the best. Draws fill the ranges evenly (a scrambled Halton sequence) and differ between
   strategies.

A trial is a run, ``FOLDER/STRATEGY/seed-SEED-HASH``, locked and resumed like others. Its settings
depend on nothing but the recipe, the seed and the trials of the grid, so kills, resuming and the
number of processes do not change them. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.grid import Outcome, run_grid
from covon_avalanche.experiment.recipe import Recipe, RecipeError, set_value, validate
from covon_avalanche.experiment.registry import StrategySettings
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.search_space import (
    Searched,
    Space,
    accepted,
    default_space,
    flat_settings,
    rounded,
)
from covon_avalanche.experiment.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

_LR_VALUES = 5
_EXTENSIONS = 4  # of the grid, at most
Settings = dict[str, Any]


def space_of(recipe: Recipe, strategy: str) -> dict[str, Space]:
    """The recipe's ``[search.STRATEGY]``, or :func:`default_space`."""
    return recipe.search.get(strategy) or default_space(recipe.strategies[strategy])


def with_settings(recipe: Recipe, strategy: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with other settings of a strategy."""
    data = recipe.model_dump() | {"search": {}}  # ranges need not fit the other settings now
    for key, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        set_value(data["strategies"][strategy], key, value)
    changed = validate(data, f"recipe {recipe.name}")
    return changed.model_copy(update={"search": recipe.search})


@dataclass(frozen=True)
class Search:
    """The search for a strategy's settings.

    :param recipe: with validation images, see ``stream.validation_size``.
    :param folder: of the searches for all strategies; several machines may share it.
    :param seed: seed of permutations, weights and draws: one that no report uses.
    :param number: of trials, without those that extend the grid.
    """

    recipe: Recipe
    strategy: str
    folder: Path
    seed: int
    number: int
    dataset_root: Path | None = None
    _trials: dict[str, Trial | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def settings(self) -> StrategySettings:
        """The recipe's own settings of the strategy."""
        return self.recipe.strategies[self.strategy]

    @property
    def space(self) -> dict[str, Space]:
        """The ranges by setting."""
        return space_of(self.recipe, self.strategy)

    def plan(self) -> list[Settings | None]:
        """The settings of all trials, ``None`` where they depend on trials to come. Draws that
        repeat, as they may among few choices, are left out."""
        space = self.space
        if "lr" not in space:
            flat = flat_settings(self.settings)
            own = {key: flat[key] for key in space if space[key].includes(flat[key])}
            return _distinct([own, *self._draws(space, self.number - 1)])
        rates = self._grid()[: self.number]
        draws = self.number - len(rates)
        low, high = space["lr"].ends
        step = (high / low) ** (1 / (_LR_VALUES - 1))
        for extensions in range(_EXTENSIONS + 1):
            scores = {rate: self.score({"lr": rate}) for rate in rates}
            known = {rate: score for rate, score in scores.items() if score is not None}
            if len(known) < len(rates):
                return [*({"lr": rate} for rate in rates), *[None] * draws]
            best = max(known, key=known.__getitem__)
            at_end = best in (min(rates), max(rates)) and known[best] > 0
            if not at_end or len(rates) < _LR_VALUES or extensions == _EXTENSIONS:
                break
            rates.append(rounded(best * step if best == max(rates) else best / step))
        near = Space(low=rounded(best / step), high=rounded(best * step))
        grid = [{"lr": rate} for rate in rates]
        return _distinct([*grid, *self._draws({**space, "lr": near}, draws)])

    def _grid(self) -> list[float]:
        """Learning rates, the nearest to the recipe's own first, for searches of few trials."""
        lr, own = self.space["lr"], float(flat_settings(self.settings)["lr"])
        middle = own if lr.includes(own) else lr.at(0.5)
        rates = [lr.at(i / (_LR_VALUES - 1)) for i in range(_LR_VALUES)]
        nearest, *others = sorted(rates, key=lambda rate: abs(math.log(rate / middle)))
        return [own if lr.includes(own) else nearest, *others]

    def _draws(self, space: Mapping[str, Space], number: int) -> list[Settings]:
        from scipy.stats.qmc import Halton

        digest = hashlib.sha256(f"{self.strategy} {self.seed}".encode()).digest()
        points = Halton(len(space), rng=int.from_bytes(digest[:8], "big")).random(number)
        return [
            {key: self._value(key, space[key], x) for key, x in zip(space, point, strict=True)}
            for point in points.tolist()
        ]

    def _value(self, key: str, space: Space, share: float) -> Any:
        """The setting at a share of its range, a whole number if its ends are."""
        value = space.at(share)
        if space.choices is None and type(accepted(self.settings, key, space.low)) is int:
            value = float(round(value))
        return accepted(self.settings, key, value)

    def trial(self, settings: Settings) -> Trial | None:
        """The run with these settings; ``None`` if they do not fit one another."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self._trials:
            self._trials[key] = None
            with suppress(RecipeError):
                recipe = with_settings(self.recipe, self.strategy, settings)
                trial = Trial(self.folder, recipe, self.strategy, self.seed, self.dataset_root)
                trial.searched, self._trials[key] = settings, trial
        return self._trials[key]

    def score(self, settings: Settings) -> float | None:
        """See :meth:`Trial.score`; 0 of settings that do not fit one another."""
        trial = self.trial(settings)
        return 0.0 if trial is None else trial.score()

    def left(self) -> int:
        """The number of trials that have not ended."""
        return sum(settings is None or self.score(settings) is None for settings in self.plan())

    def missing(self) -> list[Trial]:
        """Trials that have not ended and whose settings are known."""
        found = []
        for number, settings in enumerate(self.plan(), 1):
            if settings is not None and (trial := self.trial(settings)) is not None:
                trial.number = number
                found.append(trial)
        for trial in found:
            is_draw = trial.searched.keys() != {"lr"} and self.settings.kind != "joint"
            trial.others = [t.path for t in found if t is not trial] if is_draw else ()
        return [trial for trial in found if trial.score() is None]

    def best(self) -> tuple[Settings, Searched]:
        """The best trial's settings, and how they were found.

        :raises RecipeError: if no trial has ended, or all that have ended have failed.
        """
        completed = [
            (settings, score)
            for settings in self.plan()
            if settings is not None and (score := self.score(settings)) is not None
        ]
        if not completed:
            raise RecipeError(
                f"no trial of {self.strategy} was completed with these settings, see {self.folder}"
            )
        settings, accuracy = max(completed, key=lambda pair: pair[1])
        if not accuracy:
            raise RecipeError(f"all trials of {self.strategy} have failed, see {self.folder}")
        whole = {**flat_settings(self.settings), **settings}
        tried = {key: self.space[key] for key in self.space if any(key in s for s, _ in completed)}
        ranges = {key: space.text for key, space in tried.items()}
        at_end = [
            key
            for key, space in tried.items()
            if space.has_at_end(whole[key]) or not self._is_a_choice(key, whole[key])
        ]
        if "lr" in ranges:
            rates = sorted(s["lr"] for s, _ in completed if len(s) == 1)
            ranges["lr"] = f"{rates[0]:g} to {rates[-1]:g}"
            at_end = [key for key in at_end if key != "lr"]
            if not rates[0] < settings["lr"] < rates[-1]:
                at_end.insert(0, "lr")
        trials, more = len(completed), max(0, len(completed) - self.number)
        return settings, Searched(
            trials=trials, extensions=more, accuracy=accuracy, ranges=ranges, at_end=at_end
        )

    def _is_a_choice(self, key: str, value: Any) -> bool:
        """Whether a value is one of the choices, if there are any. The recipe's own value, which
        grid trials use, need not be; an unset one, such as ``epochs``, counts as one."""
        choices = None if value is None else self.space[key].choices
        return choices is None or value in [accepted(self.settings, key, c) for c in choices]

    def rows(self) -> list[dict[str, Any]]:
        """The trials whose settings are known, with these. ``accuracy`` is A_T on validation
        images, ``seconds`` the training time."""
        flat = flat_settings(self.settings)
        own = {key: flat[key] for key in self.space}  # trials of the grid change lr alone
        rows = []
        for number, settings in enumerate(self.plan(), 1):
            if settings is not None:
                trial = self.trial(settings)
                state = "failed" if trial is None else trial.state()[0]
                result = trial.result() if trial is not None and state == "finished" else None
                about = {
                    "strategy": self.strategy,
                    "trial": number,
                    "state": state,
                    "accuracy": math.nan if result is None else result.average_accuracy,
                    "seconds": math.nan if result is None else sum(result.train_seconds),
                }
                rows.append(about | own | settings)
        return rows

    def summary(self) -> dict[str, Any]:
        """Its state as text, and ``seconds`` of training to come."""
        rows, planned, left = self.rows(), len(self.plan()), self.left()
        known = [row["seconds"] for row in rows if row["state"] == "finished"]
        settings: Settings = {}
        found = Searched()
        with suppress(RecipeError):
            settings, found = self.best()
        return {
            "strategy": self.strategy,
            "trials": f"{planned - left}/{planned}",
            "running": str(sum(row["state"] == "running" for row in rows)),
            "best A_T %": "" if found.accuracy is None else f"{100 * found.accuracy:.2f}",
            "settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
            "at an end": "" if left else ", ".join(found.at_end),  # the grid may still be extended
            "seconds": left * fmean(known) if known else 0.0,
        }

    def store(self) -> None:
        """Write what was asked for to ``FOLDER/STRATEGY/search.json``, for :func:`searches_in`."""
        root = self.dataset_root and self.dataset_root.resolve()
        asked = _Asked(recipe=self.recipe, seed=self.seed, number=self.number, dataset_root=root)
        file = self.folder / self.strategy / "search.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, asked.model_dump_json(exclude_none=True) + "\n")


def _distinct(plan: Sequence[Settings]) -> list[Settings | None]:
    return [*{json.dumps(settings, sort_keys=True): settings for settings in plan}.values()]


class _Asked(BaseModel):
    model_config = ConfigDict(defer_build=True)
    recipe: Recipe
    seed: int
    number: int
    dataset_root: Path | None = None


def is_search(folder: Path) -> bool:
    """Whether a folder has searches."""
    return any(folder.glob("*/search.json"))


def searches_in(folder: Path) -> list[Search]:
    """The latest search for each strategy in a folder, in the recipe's order.

    :raises RecipeError: naming a damaged file.
    """
    found = []
    for file in sorted(folder.glob("*/search.json")):
        try:
            asked = _Asked.model_validate_json(file.read_bytes())
            asked.recipe.strategies[file.parent.name]  # a KeyError, if the folder was renamed
        except (ValidationError, RecipeError, KeyError) as error:
            raise RecipeError(
                f"{file} is damaged: run `covon search` for {file.parent.name} again"
            ) from error
        asked_for = asked.recipe, file.parent.name, folder, asked.seed, asked.number
        found.append(Search(*asked_for, asked.dataset_root))
    return sorted(found, key=lambda search: [*search.recipe.strategies].index(search.strategy))


def trials_in(folder: Path) -> pd.DataFrame:
    """The trials of :func:`searches_in`, see :meth:`Search.rows`."""
    import pandas as pd

    return pd.DataFrame([row for search in searches_in(folder) for row in search.rows()])


def run_searches(
    searches: Sequence[Search],
    *,
    processes: int = 1,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    poll: Callable[[list[RunFolder], list[RunFolder]], None] = lambda here, elsewhere: None,
) -> None:
    """Run the missing trials, as :func:`~covon_avalanche.experiment.grid.run_grid` runs runs; those
    that depend on others when these have ended."""
    begun: set[Path] = set()

    def missing() -> Iterable[RunFolder]:
        rows = zip_longest(*(search.missing() for search in searches))
        new = {t.path: t for row in rows for t in row if t is not None and t.path not in begun}
        begun.update(new)
        return new.values()

    def end(outcome: Outcome) -> Iterable[RunFolder]:
        on_end(outcome)
        return missing()

    run_grid([*missing()], processes=processes, on_end=end, poll=poll)
