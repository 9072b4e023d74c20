"""Hyperparameters chosen on validation data, with the same budget for every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from covon_avalanche.experiment.recipe import Choices, Range, Recipe, RecipeError, validate
from covon_avalanche.experiment.strategy_settings import WITHIN

Space = dict[str, Range | Choices]
_DONE = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Pruned(Exception):
    """A trial that is not worth finishing."""


def space_of(recipe: Recipe, strategy: str) -> Space:
    """Where to search: the recipe's ``[search.STRATEGY]``, or from a tenth of each positive
    number of the strategy's settings to ten times it, for numbers that have no upper bound.

    :raises RecipeError: if the space has a setting that the strategy does not, or nothing.
    """
    settings = recipe.strategies[strategy]
    space = recipe.search.get(strategy)
    if space is None:
        numbers = settings.model_dump()
        space = {
            key: Range(low=value / 10, high=value * 10)
            for key, value in numbers.items()
            if isinstance(value, float) and value > 0 and key not in WITHIN
        }
    for key in space:
        if key not in type(settings).model_fields or key == "kind":
            raise RecipeError(
                f"search.{strategy}.{key}: {strategy} has no such setting; known are "
                f"{', '.join(type(settings).model_fields)}"
            )
    return space


def open_study(journal: Path, recipe: Recipe, strategy: str, seed: int) -> optuna.Study:
    """The study of a strategy in a file that several processes and machines may share."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    domains = recipe.stream.n_experiences
    study = optuna.create_study(
        study_name=f"{recipe.name}/{strategy}",
        storage=storage,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=max(1, domains // 3)),
    )
    trials = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(
        seed=seed + trials, n_startup_trials=5, constant_liar=True
    )
    return study


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

    The first has the recipe's own settings. A trial is pruned below the median of the others'
    mean accuracy on the domains so far. The objective is A_T on the validation stream.

    :param trials: of this strategy in all; those that others make at the same time count.
    :param seed: of permutations, weights and sampler: one that no report uses.
    :raises RecipeError: if the recipe has no validation images, or a wrong search space.
    """
    space = space_of(recipe, strategy)
    if not (validation_size or recipe.stream.validation_size):
        raise RecipeError(
            f"recipe {recipe.name} holds out no validation images: set stream.validation_size"
        )
    while True:
        study = open_study(journal, recipe, strategy, seed)
        stored = study.get_trials(deepcopy=False)
        if sum(trial.state in _DONE for trial in stored) >= trials:
            return
        if not stored:
            own = recipe.strategies[strategy].model_dump()
            study.enqueue_trial({key: own[key] for key in space})
        trial = study.ask()
        text = _attempt(recipe, strategy, trial, study, space, seed, validation_size, dataset_root)
        notify(f"{strategy}, trial {trial.number + 1}: {text}")


def _attempt(
    recipe: Recipe,
    strategy: str,
    trial: optuna.Trial,
    study: optuna.Study,
    space: Space,
    seed: int,
    validation_size: float | None,
    dataset_root: str | None,
) -> str:
    """One trial; what came of it."""
    from covon_avalanche.experiment.run import run_strategy

    settings = {key: _suggest(trial, key, values) for key, values in space.items()}

    def progress(domains: int, accuracy: float) -> None:
        if recipe.strategies[strategy].kind != "joint":
            trial.report(accuracy, domains)
            if trial.should_prune():
                raise Pruned

    try:
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
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise
    study.tell(trial, result.average_accuracy)
    return f"A_T {100 * result.average_accuracy:.2f} % on validation images, {settings}"


def _suggest(trial: optuna.Trial, key: str, values: Range | Choices) -> Any:
    if isinstance(values, Choices):
        return trial.suggest_categorical(key, values.choices)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def with_settings(recipe: Recipe, strategy: str, settings: dict[str, Any]) -> Recipe:
    """The recipe with other settings of a strategy."""
    data = recipe.model_dump()
    data["strategies"][strategy] |= settings
    return validate(data, f"recipe {recipe.name}")


def best_settings(
    journal: Path, recipe: Recipe, strategy: str, trials: int
) -> tuple[dict[str, Any], float]:
    """The best trial's settings and its A_T on validation images.

    :param trials: how many count, the first ones: processes that work together may make one
        more than was asked for.
    :raises RecipeError: if none was completed.
    """
    stored = open_study(journal, recipe, strategy, 0).get_trials()
    counted = [trial for trial in stored if trial.state in _DONE][:trials]
    complete = [trial for trial in counted if trial.state is TrialState.COMPLETE]
    if not complete:
        raise RecipeError(f"no trial of {strategy} was completed, see {journal}")
    best = max(complete, key=lambda trial: trial.value or 0.0)
    return dict(best.params), float(best.value or 0.0)


def recipe_text(recipe: Recipe, comments: dict[str, str]) -> str:
    """A recipe as TOML.

    :param comments: behind the tables of strategies, by name.
    """
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    lines = [f"{k} = {_toml(v)}" for k, v in data.items() if not isinstance(v, dict)]
    tables = {k: v for k, v in data.items() if isinstance(v, dict) and k != "strategies"}
    tables.pop("search", None)
    notes = {f"strategies.{name}": f"  # {text}" for name, text in comments.items()}
    tables |= {f"strategies.{_key(name)}": s for name, s in data["strategies"].items()}
    for title, table in tables.items():
        lines += ["", f"[{title}]{notes.get(title, '')}"]
        lines += [f"{k} = {_toml(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return '""' if value is None else json.dumps(value, ensure_ascii=False)
