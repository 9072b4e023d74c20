"""Hyperparameters chosen on validation data, with the same budget for every strategy."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from covon_avalanche.experiment.recipe import Recipe, RecipeError, Space, set_value, validate
from covon_avalanche.experiment.registry import StrategySettings
from covon_avalanche.experiment.result import first_error
from covon_avalanche.experiment.run_folder import (
    is_locked,
    is_out_of_memory,
    run_error,
    run_hash,
)
from covon_avalanche.experiment.run_options import RunOptions

_log = logging.getLogger(__name__)


def space_of(recipe: Recipe, strategy: str) -> dict[str, Space]:
    """Where to search: the recipe's ``[search.STRATEGY]``, or from a tenth of each of the
    strategy's settings to ten times it, for positive unbounded numbers on a continuous scale.
    ``arguments.KEY`` is an argument of a user-defined class.

    :raises RecipeError: if the strategy has no such setting, or the setting does not take a value
        of the space.
    """
    settings = recipe.strategies[strategy]
    space = recipe.search.get(strategy, {})
    if not space:
        space = {
            key: Space(low=value / 10, high=value * 10)
            for key, value in settings.model_dump().items()
            if isinstance(value, float) and value > 0
            if settings.is_searched(key) and _is_unbounded(settings, key)
        }
    known = _flat(settings)
    for key, values in space.items():
        if key not in known or key == "kind":
            raise RecipeError(
                f"search.{strategy}.{key}: {strategy} has no such setting; known are "
                f"{', '.join(known)}"
            )
        for value in values.ends:
            try:
                _validated(settings, key, value)
            except ValidationError as error:
                what = first_error(error)
                raise RecipeError(f"search.{strategy}.{key}: {value!r}: {what}") from error
    return space


def _is_unbounded(settings: StrategySettings, key: str) -> bool:
    """Whether a setting has no upper bound; arguments of Avalanche's classes have none."""
    field = type(settings).model_fields.get(key)
    return field is None or not any(
        hasattr(bound, "le") or hasattr(bound, "lt") for bound in field.metadata
    )


def _flat(settings: StrategySettings) -> dict[str, Any]:
    """Values by key, including arguments of a user-defined class as ``arguments.KEY``."""
    whole = settings.model_dump()
    return whole | {f"arguments.{key}": v for key, v in whole.get("arguments", {}).items()}


def _validated(settings: StrategySettings, key: str, value: Any) -> Any:
    """The value as the setting takes it: 50.0 becomes 50 where the recipe has a whole number."""
    if type(_flat(settings)[key]) is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    table = settings.model_dump()
    set_value(table, key, value)
    return _flat(type(settings).model_validate(table))[key]


def with_settings(recipe: Recipe, strategy: str, settings: dict[str, Any]) -> Recipe:
    """The recipe with other settings of a strategy."""
    data = recipe.model_dump()
    for key, value in settings.items():
        set_value(data["strategies"][strategy], key, value)
    return validate(data, f"recipe {recipe.name}")


@dataclass(frozen=True)
class Search:
    """The search for a strategy's settings.

    :param recipe: with validation images, see ``stream.validation_size``.
    :param journal: a file that several processes and machines may share.
    :param seed: seed of permutations, weights and sampler: one that no report uses.
    :raises RecipeError: if the recipe has no validation images or an invalid search space.
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
        """The recipe's own settings of the strategy."""
        return self.recipe.strategies[self.strategy]

    def study(self) -> optuna.Study:
        """The Optuna study in the journal; it is created if there is none."""
        domains = self.recipe.stream.n_experiences
        return optuna.create_study(
            study_name=self._name,
            storage=self._storage(),
            direction="maximize",
            load_if_exists=True,
            pruner=MedianPruner(
                n_startup_trials=0, n_warmup_steps=max(1, domains // 3), n_min_trials=4
            ),
        )

    @property
    def _name(self) -> str:
        """It hashes everything that affects a trial, so that different searches do not mix."""
        space = {k: v.model_dump() for k, v in space_of(self.recipe, self.strategy).items()}
        run = run_hash(self.recipe, self.strategy, self.seed)
        identity = json.dumps([run, space], sort_keys=True)
        return f"{self.strategy}/{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    def _storage(self) -> JournalStorage:
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalFileBackend(str(self.journal), _JournalLock(self.journal))
        records = self.journal.read_bytes().splitlines(keepends=True)[:-1]
        bad = next((i for i, record in enumerate(records, 1) if not _is_record(record)), None)
        if bad is not None:
            raise RecipeError(f"{self.journal}, line {bad}, is damaged: remove the line")
        return JournalStorage(storage)

    def run(
        self,
        trials: int,
        options: RunOptions = RunOptions(),
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run the missing trials.

        The first has the recipe's own settings, where the space includes them. A trial is pruned
        if its mean accuracy on the domains so far is below the median of the others. The objective
        is A_T on the validation stream.

        :param trials: total number, including those of other processes.
        """
        study = self.study()
        while (claim := self._claim(study, trials)) is not None:
            lock, trial = claim
            try:
                ended = study.tell(trial, self._objective(trial, options))
            except optuna.TrialPruned:
                ended = study.tell(trial, state=TrialState.PRUNED)
            finally:
                lock.release()
            pruned = ended.state is TrialState.PRUNED
            value = f"A_T {100 * (ended.value or 0.0):.2f} % on validation images, {ended.params}"
            text = ended.user_attrs.get("error", "pruned" if pruned else value)
            notify(f"{self.strategy}, trial {ended.user_attrs['index'] + 1}: {text}")

    def _claim(self, study: optuna.Study, trials: int) -> tuple[FileLock, optuna.Trial] | None:
        """A missing trial and its lock, or ``None`` if all are done or claimed by other processes.

        A trial of a killed process has no lock: it fails, and its index is free again. The seed of
        the sampler depends on the index, so that a resumed search draws what an uninterrupted one
        does, and processes that search together draw different settings. An index that has failed
        three times, perhaps for lack of memory, draws others.
        """
        folder = self.journal.parent / ".claims" / self._name
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "all.lock"):
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if not is_locked(folder / f"{trial.user_attrs.get('index', 'no')}.lock"):
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            free = [k for k in range(trials) if not is_locked(folder / f"{k}.lock")]
            done = _done(study)  # after looking at the locks, which are released later
            index = next((k for k in free if k not in done), None)
            if index is None:
                return None
            lock = FileLock(folder / f"{index}.lock")
            lock.acquire()
            failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            again = max(0, sum(t.user_attrs.get("index") == index for t in failed) - 2)
            waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if index == 0 and not again and not waiting:
                study.enqueue_trial(self._own_settings())
            seed = self.seed + index + 1_000_003 * again
            study.sampler = TPESampler(seed=seed, n_startup_trials=5, constant_liar=True)
            claimed = study.ask()
            claimed.set_user_attr("index", index)
            return lock, claimed

    def _own_settings(self) -> dict[str, Any]:
        """The recipe's, where the space includes them."""
        flat, space = _flat(self.settings), space_of(self.recipe, self.strategy)
        return {key: flat[key] for key, values in space.items() if _lies_in(flat[key], values)}

    def _objective(self, trial: optuna.Trial, options: RunOptions) -> float:
        from covon_avalanche.experiment.run import run_strategy

        space = space_of(self.recipe, self.strategy)
        settings = {key: self._suggest(trial, key, values) for key, values in space.items()}

        def on_domain(domains: int, accuracy: float) -> None:
            # The number of domains is added because the pruner compares the best value so far,
            # whereas accuracy falls from domain to domain.
            trial.report(domains + accuracy, domains)
            if self.settings.kind != "joint" and trial.should_prune():
                raise optuna.TrialPruned

        recipe = with_settings(self.recipe, self.strategy, settings)
        try:
            result = run_strategy(
                recipe, self.strategy, self.seed, options, stream="valid", on_domain=on_domain
            )
        except (FloatingPointError, MemoryError, RuntimeError) as error:
            if not _due_to_settings(error):
                raise
            trial.set_user_attr("error", f"failed: {run_error(error)}")
            return 0.0
        return result.average_accuracy

    def _suggest(self, trial: optuna.Trial, key: str, space: Space) -> Any:
        if space.choices is not None:
            return trial.suggest_categorical(key, space.choices)
        low, high = (_validated(self.settings, key, end) for end in space.ends)
        suggest = trial.suggest_int if isinstance(low, int) else trial.suggest_float
        return suggest(key, low, high, log=space.log)

    def best(self, trials: int) -> tuple[dict[str, Any], float]:
        """The best trial's settings and its A_T on validation images.

        :param trials: only the first so many count.
        :raises RecipeError: if none was completed, or all diverged.
        """
        try:
            stored = optuna.load_study(study_name=self._name, storage=self._storage())
            counted = [trial for index, trial in _done(stored).items() if index < trials]
        except KeyError:  # the strategy was never searched
            counted = []
        complete = [trial for trial in counted if trial.state is TrialState.COMPLETE]
        if not complete:
            raise RecipeError(f"no trial of {self.strategy} was completed, see {self.journal}")
        best = max(complete, key=lambda trial: trial.value or 0.0)
        if not best.value:
            raise RecipeError(f"all trials of {self.strategy} diverged, see {self.journal}")
        return dict(best.params), float(best.value)


class _JournalLock(JournalFileSymlinkLock):
    """Optuna's lock, a link to the journal. Whoever acquires it drops an incomplete last record,
    which a kill or a full disk leaves, because the next record would be appended to it."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal.resolve()))  # a link to a relative path is never broken
        self.journal = journal.resolve()

    def acquire(self) -> bool:
        acquired, content = super().acquire(), self.journal.read_bytes()
        *_, last = [b"", *content.splitlines(keepends=True)]
        if last and not _is_record(last):
            _log.warning("%s: an incomplete last record was dropped", self.journal)
            os.truncate(self.journal, len(content) - len(last))
        return acquired

    def release(self) -> None:
        """Optuna's renames the link first, and leaves it there if the process is killed then."""
        self.journal.with_name(f"{self.journal.name}.lock").unlink(missing_ok=True)


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and type(json.loads(line)["op_code"]) is int
    except (ValueError, LookupError, TypeError):
        return False


def _done(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Trials that count, by index; those of earlier versions are numbered by their order."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return {trial.user_attrs.get("index", n): trial for n, trial in enumerate(done)}


def _due_to_settings(error: Exception) -> bool:
    """Whether training has diverged, or needs more memory than there is."""
    import torch

    diverged = isinstance(error, FloatingPointError | torch.linalg.LinAlgError)
    return diverged or is_out_of_memory(error)


def _lies_in(value: Any, space: Space) -> bool:
    if space.choices is not None:
        return value in space.choices
    low, high = space.ends
    return value is not None and low <= value <= high
