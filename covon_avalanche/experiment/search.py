"""Hyperparameters chosen on validation data, with the same budget for every strategy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import optuna
from optuna.samplers import BaseSampler, PartialFixedSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import ValidationError

from covon_avalanche.experiment.recipe import Choices, Range, Recipe, RecipeError, Space, validate
from covon_avalanche.experiment.registry import StrategySettings
from covon_avalanche.experiment.run_folder import run_hash
from covon_avalanche.experiment.run_options import RunOptions

_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
"""What counts: no trial that was interrupted (``FAIL``) or whose process died (``RUNNING``)."""


class Pruned(Exception):
    """A trial that is not worth finishing."""


class BelowMedian(optuna.pruners.BasePruner):
    """Prunes a trial that is below the median of the others after as many domains.

    Optuna's ``MedianPruner`` compares the best value so far, which for a mean accuracy that falls
    from domain to domain is the first one: what forgets the most would never be pruned.

    :param trials: number of trials that must have come as far before.
    :param domains: no trial is pruned before so many.
    """

    def __init__(self, trials: int, domains: int) -> None:
        self.trials, self.domains = trials, domains

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the trial is not worth finishing."""
        domains = trial.last_step
        if domains is None or domains < self.domains:
            return False
        curves = [t.intermediate_values for t in study.get_trials(deepcopy=False, states=_DONE)]
        others = [curve[domains] for curve in curves if domains in curve]
        here = trial.intermediate_values[domains]
        return len(others) >= self.trials and here < median(others)


def space_of(recipe: Recipe, strategy: str) -> dict[str, Space]:
    """Where to search: the recipe's ``[search.STRATEGY]``, or from a tenth of each of the
    strategy's settings to ten times it, for positive numbers on a continuous scale without end.
    ``arguments.KEY`` is an argument of a class of the user's.

    :raises RecipeError: if the space has a setting that the strategy does not, or a value that
        the setting does not take.
    """
    settings = recipe.strategies[strategy]
    space = recipe.search.get(strategy, {})
    if not space:
        space = {
            key: Range(low=value / 10, high=value * 10)
            for key, value in settings.model_dump().items()
            if isinstance(value, float) and value > 0
            if key not in settings.not_searched and not _has_upper_bound(settings, key)
        }
    known = _flat(settings)
    for key, values in space.items():
        if key not in known or key == "kind":
            raise RecipeError(
                f"search.{strategy}.{key}: {strategy} has no such setting; known are "
                f"{', '.join(known)}"
            )
        ends = [values.low, values.high] if isinstance(values, Range) else values.choices
        for value in ends:
            try:
                _validated(settings, key, value)
            except ValidationError as error:
                message = error.errors()[0]["msg"]
                raise RecipeError(f"search.{strategy}.{key}: {value!r}: {message}") from error
    return space


def _has_upper_bound(settings: StrategySettings, key: str) -> bool:
    bounds = type(settings).model_fields[key].metadata
    return any(hasattr(bound, "le") or hasattr(bound, "lt") for bound in bounds)


def _flat(settings: StrategySettings) -> dict[str, Any]:
    """Values by key; arguments of a class of the user's as ``arguments.KEY``, too."""
    whole = settings.model_dump()
    return whole | {f"arguments.{key}": v for key, v in whole.get("arguments", {}).items()}


def _changed(settings: StrategySettings, values: dict[str, Any]) -> dict[str, Any]:
    """The settings as a table, with other values by key."""
    whole = settings.model_dump()
    for key, value in values.items():
        if key.startswith("arguments."):
            whole["arguments"][key.removeprefix("arguments.")] = value
        else:
            whole[key] = value
    return whole


def _validated(settings: StrategySettings, key: str, value: Any) -> Any:
    """A value as the setting takes it: 50.0 is 50 for a number of examples, and for an argument
    that the recipe gives as a whole number."""
    whole_number = key.startswith("arguments.") and type(_flat(settings)[key]) is int
    if whole_number and isinstance(value, float) and value.is_integer():
        value = int(value)
    return _flat(type(settings).model_validate(_changed(settings, {key: value})))[key]


def with_settings(recipe: Recipe, strategy: str, settings: dict[str, Any]) -> Recipe:
    """The recipe with other settings of a strategy."""
    data = recipe.model_dump()
    data["strategies"][strategy] = _changed(recipe.strategies[strategy], settings)
    return validate(data, f"recipe {recipe.name}")


@dataclass(frozen=True)
class Search:
    """The search for a strategy's settings.

    :param recipe: with validation images, see ``stream.validation_size``.
    :param journal: a file that several processes and machines may share.
    :param seed: of permutations, weights and sampler: one that no report uses.
    :raises RecipeError: if the recipe has no validation images, or a wrong search space.
    """

    recipe: Recipe
    strategy: str
    journal: Path
    seed: int

    def __post_init__(self) -> None:
        if not self.recipe.stream.validation_size:
            raise RecipeError(
                f"recipe {self.recipe.name} holds out no validation images: give "
                "--validation-size, or set stream.validation_size"
            )
        space_of(self.recipe, self.strategy)

    @property
    def settings(self) -> StrategySettings:
        """The recipe's own."""
        return self.recipe.strategies[self.strategy]

    def study(self) -> optuna.Study:
        """Optuna's study in the journal."""
        domains = self.recipe.stream.n_experiences
        return optuna.create_study(
            study_name=self._name,
            storage=self._storage(),
            direction="maximize",
            load_if_exists=True,
            pruner=BelowMedian(trials=4, domains=max(1, domains // 3)),
        )

    @property
    def _name(self) -> str:
        """It has all that decides a trial, so that searches which differ do not mix."""
        space = {k: v.model_dump() for k, v in space_of(self.recipe, self.strategy).items()}
        run = run_hash(self.recipe, self.strategy, self.seed)
        identity = json.dumps([run, space], sort_keys=True)
        return f"{self.strategy}/{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    def _storage(self) -> JournalStorage:
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        # Optuna's lock is a symbolic link to the file: a relative one would never be broken.
        return JournalStorage(JournalFileBackend(str(self.journal.resolve())))

    def run(
        self,
        trials: int,
        options: RunOptions = RunOptions(),
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make the trials that are missing.

        The first has the recipe's own settings, where the space has them. A trial is pruned below
        the median of the others' mean accuracy on the domains so far. The objective is A_T on the
        validation stream.

        :param trials: in all; those that others make at the same time count.
        """
        study = self.study()
        space = space_of(self.recipe, self.strategy)
        while (missing := trials - len(study.get_trials(deepcopy=False, states=_DONE))) > 0:
            trial = study.ask()
            try:
                study.sampler = self.sampler(study, trial.number, last=missing == 1)
                drawn = {key: self._suggest(trial, key, values) for key, values in space.items()}
                text = self._try(study, trial, drawn, options)
            except BaseException:
                study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
                raise
            notify(f"{self.strategy}, trial {trial.number + 1}: {text}")

    def sampler(self, study: optuna.Study, number: int, last: bool) -> BaseSampler:
        """Of one trial: its draws depend on its number, and so differ between processes.

        The first trial draws the recipe's own settings, or a later one if that was interrupted.

        :param last: whether no other follows; then what still runs counts as interrupted, too: its
            process may have been killed.
        """
        flat = _flat(self.settings)
        space = space_of(self.recipe, self.strategy)
        own = {key: flat[key] for key, values in space.items() if _lies_in(flat[key], values)}
        sampler = TPESampler(seed=self.seed + number, n_startup_trials=5, constant_liar=True)
        counted = _DONE if last else (*_DONE, TrialState.RUNNING)
        tried = any(
            trial.state in counted
            for trial in study.get_trials(deepcopy=False)[:number]
            if trial.number == 0 or own.items() <= trial.params.items()
        )
        return sampler if tried else PartialFixedSampler(own, sampler)

    def _suggest(self, trial: optuna.Trial, key: str, values: Range | Choices) -> Any:
        if isinstance(values, Choices):
            return trial.suggest_categorical(key, values.choices)
        low, high = (_validated(self.settings, key, end) for end in (values.low, values.high))
        if isinstance(low, int):
            return trial.suggest_int(key, low, high, log=values.log)
        return trial.suggest_float(key, values.low, values.high, log=values.log)

    def _try(
        self, study: optuna.Study, trial: optuna.Trial, drawn: dict[str, Any], options: RunOptions
    ) -> str:
        """One trial; what came of it."""
        from covon_avalanche.experiment.run import run_strategy

        def on_domain(domains: int, accuracy: float) -> None:
            if self.settings.kind != "joint":
                trial.report(accuracy, domains)
                if trial.should_prune():
                    raise Pruned

        recipe = with_settings(self.recipe, self.strategy, drawn)
        try:
            result = run_strategy(
                recipe, self.strategy, self.seed, options, stream="valid", on_domain=on_domain
            )
        except Pruned:
            study.tell(trial, state=TrialState.PRUNED)
            return "pruned"
        except FloatingPointError as error:
            study.tell(trial, 0.0)
            return f"diverged: {error}"
        study.tell(trial, result.average_accuracy)
        return f"A_T {100 * result.average_accuracy:.2f} % on validation images, {drawn}"

    def best(self, trials: int) -> tuple[dict[str, Any], float]:
        """The best trial's settings and its A_T on validation images.

        :param trials: how many count, the first ones: processes that work together may make one
            more than was asked for.
        :raises RecipeError: if none was completed, or all diverged.
        """
        try:
            stored = optuna.load_study(study_name=self._name, storage=self._storage())
            counted = stored.get_trials(states=_DONE)[:trials]
        except KeyError:  # nobody has searched it
            counted = []
        complete = [trial for trial in counted if trial.state is TrialState.COMPLETE]
        if not complete:
            raise RecipeError(f"no trial of {self.strategy} was completed, see {self.journal}")
        best = max(complete, key=lambda trial: trial.value or 0.0)
        if not best.value:
            raise RecipeError(f"all trials of {self.strategy} diverged, see {self.journal}")
        return dict(best.params), float(best.value)


def _lies_in(value: Any, values: Range | Choices) -> bool:
    if isinstance(values, Choices):
        return value in values.choices
    return value is not None and values.low <= value <= values.high
