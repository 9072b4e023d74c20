"""Hyperparameters chosen on validation data, with the same budget for every strategy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import ValidationError

from covon_avalanche.experiment.recipe import Choices, Range, Recipe, RecipeError, Space, validate
from covon_avalanche.experiment.run_folder import run_hash
from covon_avalanche.experiment.strategy_settings import HAS_OWN_SCALE, Settings, has_upper_bound

_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
"""What counts: no trial that was interrupted (``FAIL``) or whose process died (``RUNNING``)."""


class Pruned(Exception):
    """A trial that is not worth finishing."""


class BelowMedian(optuna.pruners.BasePruner):
    """Prunes a trial that is below the median of the others after as many domains.

    Optuna's ``MedianPruner`` compares the best value so far, which for a mean accuracy that falls
    from domain to domain is the first one: what forgets the most would never be pruned.

    :param trials: that must have come as far before.
    :param domains: that no trial is pruned before.
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
        numbers = settings.model_dump()
        space = {
            key: Range(low=value / 10, high=value * 10)
            for key, value in numbers.items()
            if isinstance(value, float) and value > 0
            if key not in HAS_OWN_SCALE and not has_upper_bound(settings, key)
        }
    for key, values in space.items():
        if key not in _flat(settings) or key == "kind":
            raise RecipeError(
                f"search.{strategy}.{key}: {strategy} has no such setting; known are "
                f"{', '.join(_flat(settings))}"
            )
        ends = [values.low, values.high] if isinstance(values, Range) else values.choices
        for value in ends:
            try:
                _as_setting(settings, key, value)
            except ValidationError as error:
                message = error.errors()[0]["msg"]
                raise RecipeError(f"search.{strategy}.{key}: {value!r}: {message}") from error
    return space


def _flat(settings: Settings) -> dict[str, Any]:
    """Values by key; arguments of a class of the user's as ``arguments.KEY``, too."""
    whole = settings.model_dump()
    return whole | {f"arguments.{key}": v for key, v in whole.get("arguments", {}).items()}


def _changed(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """The settings as a table, with other values by key."""
    whole = settings.model_dump()
    for key, value in values.items():
        if key.startswith("arguments."):
            whole["arguments"][key.removeprefix("arguments.")] = value
        else:
            whole[key] = value
    return whole


def _as_setting(settings: Settings, key: str, value: Any) -> Any:
    """A value as the setting takes it: 50.0 is 50 for a number of examples, and for an argument
    that the recipe gives as a whole number."""
    whole_number = key.startswith("arguments.") and type(_flat(settings)[key]) is int
    if whole_number and isinstance(value, float) and value.is_integer():
        value = int(value)
    return _flat(type(settings).model_validate(_changed(settings, {key: value})))[key]


def open_study(
    journal: Path,
    recipe: Recipe,
    strategy: str,
    seed: int,
    validation_size: float | None = None,
) -> optuna.Study:
    """The study of a strategy in a file that several processes and machines may share."""
    domains = recipe.stream.n_experiences
    return optuna.create_study(
        study_name=_study_name(recipe, strategy, seed, validation_size),
        storage=_storage(journal),
        direction="maximize",
        load_if_exists=True,
        pruner=BelowMedian(trials=4, domains=max(1, domains // 3)),
    )


def _study_name(
    recipe: Recipe, strategy: str, seed: int, validation_size: float | None = None
) -> str:
    """It has all that decides a trial, so that searches which differ do not mix."""
    space = {key: values.model_dump() for key, values in space_of(recipe, strategy).items()}
    images = float(validation_size or recipe.stream.validation_size)
    identity = json.dumps([run_hash(recipe, strategy, seed), space, images], sort_keys=True)
    return f"{strategy}/{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def _storage(journal: Path) -> JournalStorage:
    journal.parent.mkdir(parents=True, exist_ok=True)
    # Optuna's lock is a link to the file: a relative one would lead nowhere and never be broken.
    return JournalStorage(JournalFileBackend(str(journal.resolve())))


def search_strategy(
    recipe: Recipe,
    strategy: str,
    journal: Path,
    *,
    trials: int,
    seed: int,
    validation_size: float | None = None,
    dataset_root: str | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Make the trials that are missing.

    The first has the recipe's own settings, where the space has them. A trial is pruned below the
    median of the others' mean accuracy on the domains so far. The objective is A_T on the
    validation stream.

    :param trials: of this strategy in all; those that others make at the same time count.
    :param seed: of permutations, weights and sampler: one that no report uses.
    :raises RecipeError: if the recipe has no validation images, or a wrong search space.
    """
    space = space_of(recipe, strategy)
    if not (validation_size or recipe.stream.validation_size):
        raise RecipeError(
            f"recipe {recipe.name} holds out no validation images: give --validation-size, or set "
            "stream.validation_size"
        )
    settings = recipe.strategies[strategy]
    study = open_study(journal, recipe, strategy, seed, validation_size)
    while (missing := trials - _done(study)) > 0:
        trial = study.ask()
        try:
            own = _own(settings, space)
            study.sampler = _sampler(study, trial.number, seed, own, last=missing == 1)
            drawn = {key: _suggest(trial, settings, key, values) for key, values in space.items()}
            text = _attempt(
                recipe, strategy, drawn, trial, study, seed, validation_size, dataset_root
            )
        except BaseException:
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise
        notify(f"{strategy}, trial {trial.number + 1}: {text}")


def _done(study: optuna.Study) -> int:
    return sum(trial.state in _DONE for trial in study.get_trials(deepcopy=False))


def _own(settings: Settings, space: dict[str, Space]) -> dict[str, Any]:
    """The recipe's own settings, as far as they lie in the space."""
    own = _flat(settings)
    return {key: own[key] for key, values in space.items() if _lies_in(own[key], values)}


def _lies_in(value: Any, values: Range | Choices) -> bool:
    if isinstance(values, Choices):
        return value in values.choices
    return value is not None and values.low <= value <= values.high


def _sampler(
    study: optuna.Study, number: int, seed: int, own: dict[str, Any], last: bool
) -> optuna.samplers.BaseSampler:
    """Of one trial: its draws depend on its number, and so differ between processes.

    :param own: drawn by the first trial, or another if that was interrupted.
    :param last: whether no other follows; then what still runs counts as interrupted, too: its
        process may have been killed.
    """
    sampler = optuna.samplers.TPESampler(seed=seed + number, n_startup_trials=5, constant_liar=True)
    counted = _DONE if last else (*_DONE, TrialState.RUNNING)
    tried = any(
        trial.state in counted
        for trial in study.get_trials(deepcopy=False)[:number]
        if trial.number == 0 or own.items() <= trial.params.items()
    )
    if tried:
        return sampler
    return optuna.samplers.PartialFixedSampler(own, sampler)


def _attempt(
    recipe: Recipe,
    strategy: str,
    settings: dict[str, Any],
    trial: optuna.Trial,
    study: optuna.Study,
    seed: int,
    validation_size: float | None,
    dataset_root: str | None,
) -> str:
    """One trial; what came of it."""

    def progress(domains: int, accuracy: float) -> None:
        if recipe.strategies[strategy].kind != "joint":
            trial.report(accuracy, domains)
            if trial.should_prune():
                raise Pruned

    try:
        from covon_avalanche.experiment.run import run_strategy

        result = run_strategy(
            with_settings(recipe, strategy, settings),
            strategy,
            seed,
            stream="valid",
            validation_size=validation_size,
            dataset_root=dataset_root,
            progress=progress,
        )
    except Pruned:
        study.tell(trial, state=TrialState.PRUNED)
        return "pruned"
    except FloatingPointError as error:
        study.tell(trial, 0.0)
        return f"diverged: {error}"
    study.tell(trial, result.average_accuracy)
    return f"A_T {100 * result.average_accuracy:.2f} % on validation images, {settings}"


def _suggest(trial: optuna.Trial, settings: Settings, key: str, values: Range | Choices) -> Any:
    if isinstance(values, Choices):
        return trial.suggest_categorical(key, values.choices)
    low, high = (_as_setting(settings, key, end) for end in (values.low, values.high))
    if isinstance(low, int):
        return trial.suggest_int(key, low, high, log=values.log)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def with_settings(recipe: Recipe, strategy: str, settings: dict[str, Any]) -> Recipe:
    """The recipe with other settings of a strategy."""
    data = recipe.model_dump()
    data["strategies"][strategy] = _changed(recipe.strategies[strategy], settings)
    return validate(data, f"recipe {recipe.name}")


def best_settings(
    journal: Path,
    recipe: Recipe,
    strategy: str,
    trials: int,
    *,
    seed: int,
    validation_size: float | None = None,
) -> tuple[dict[str, Any], float]:
    """The best trial's settings and its A_T on validation images.

    :param trials: how many count, the first ones: processes that work together may make one
        more than was asked for.
    :param seed: of the search, as its validation size and the recipe.
    :raises RecipeError: if none was completed, or all diverged.
    """
    name = _study_name(recipe, strategy, seed, validation_size)
    try:
        stored = optuna.load_study(study_name=name, storage=_storage(journal)).get_trials()
    except KeyError:  # nobody has searched it
        stored = []
    counted = [trial for trial in stored if trial.state in _DONE][:trials]
    complete = [trial for trial in counted if trial.state is TrialState.COMPLETE]
    if not complete:
        raise RecipeError(f"no trial of {strategy} was completed, see {journal}")
    best = max(complete, key=lambda trial: trial.value or 0.0)
    if not best.value:
        raise RecipeError(f"all trials of {strategy} diverged, see {journal}")
    return dict(best.params), float(best.value)
