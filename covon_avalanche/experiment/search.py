"""Hyperparameters chosen on validation images, by the same protocol for every strategy.

1. The learning rate: five of them on a logarithmic grid over its range, in which the
   recipe's own takes the place of the nearest. While the best is at an end, the grid is extended
   by one, at most four times.
2. The remaining trials draw all searched settings, the learning rate within a step of the grid
   around the best. Draws fill the ranges evenly (a scrambled Halton sequence) and differ between
   strategies.

The settings of a trial depend on nothing but the recipe, the seed and the trials of the grid, so
kills, resuming and the number of processes do not change them. Optuna stores the trials and prunes
draws, by those that are finished.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.pruners import MedianPruner
from optuna.trial import FrozenTrial, TrialState

from covon_avalanche.experiment.recipe import Recipe, RecipeError, set_value, validate
from covon_avalanche.experiment.registry import StrategySettings
from covon_avalanche.experiment.run_folder import (
    is_locked,
    is_out_of_memory,
    run_error,
    run_hash,
)
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.search_journal import open_journal
from covon_avalanche.experiment.search_space import (
    Searched,
    Space,
    accepted,
    check_space,
    default_space,
    flat_settings,
    rounded,
)

_LR_VALUES = 5
_EXTENSIONS = 4  # of the grid, at most
_ATTEMPTS = 3  # after which a trial that ends its process counts as failed
_WAIT = 0.5  # seconds, for trials of other processes
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
    :param journal: a file that several processes and machines may share.
    :param seed: seed of permutations, weights and draws: one that no report uses.
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
        try:
            check_space(self.strategy, self.settings, self.space)
        except ValueError as error:
            raise RecipeError(f"search.{error}") from error

    @property
    def settings(self) -> StrategySettings:
        """The recipe's own settings of the strategy."""
        return self.recipe.strategies[self.strategy]

    @property
    def space(self) -> dict[str, Space]:
        """The ranges by setting."""
        return space_of(self.recipe, self.strategy)

    # The plan -----------------------------------------------------------------------------------

    def plan(self, scores: Mapping[int, float], trials: int) -> list[Settings | None]:
        """The settings of all trials by index; ``None`` where they depend on trials to come.

        :param scores: A_T of finished trials by index.
        :param trials: their number without those that extend the grid.
        """
        flat, space = flat_settings(self.settings), self.space
        if "lr" not in space:
            own = {key: flat[key] for key in space if space[key].includes(flat[key])}
            return [own, *self._draws(space, trials - 1)]
        rates = self._grid()[:trials]
        draws = trials - len(rates)
        low, high = space["lr"].ends
        step = (high / low) ** (1 / (_LR_VALUES - 1))
        for extensions in range(_EXTENSIONS + 1):
            if any(index not in scores for index in range(len(rates))):
                return [*({"lr": rate} for rate in rates), *[None] * draws]
            best = max(rates, key=lambda rate: scores[rates.index(rate)])
            at_end = best in (min(rates), max(rates)) and scores[rates.index(best)] > 0
            if not at_end or len(rates) < _LR_VALUES or extensions == _EXTENSIONS:
                break
            rates.append(rounded(best * step if best == max(rates) else best / step))
        near = Space(low=rounded(best / step), high=rounded(best * step))
        return [*({"lr": rate} for rate in rates), *self._draws({**space, "lr": near}, draws)]

    def _grid(self) -> list[float]:
        """Learning rates, the recipe's own first."""
        lr, own = self.space["lr"], float(flat_settings(self.settings)["lr"])
        rates = [lr.at(i / (_LR_VALUES - 1)) for i in range(_LR_VALUES)]
        if not lr.includes(own):
            return rates
        rates.remove(min(rates, key=lambda rate: abs(math.log(rate / own))))
        return [own, *rates]

    def _draws(self, space: Mapping[str, Space], number: int) -> list[Settings | None]:
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

    # Trials -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Without the study: another process opens the journal itself."""
        return {key: value for key, value in self.__dict__.items() if key != "study"}

    @cached_property
    def study(self) -> optuna.Study:
        """The Optuna study in the journal; it is created if there is none."""
        domains = self.recipe.stream.n_experiences
        study = optuna.create_study(
            study_name=self._name,
            storage=open_journal(self.journal),
            direction="maximize",
            load_if_exists=True,
            pruner=MedianPruner(
                n_startup_trials=0, n_warmup_steps=max(1, domains // 3), n_min_trials=4
            ),
        )
        if "strategy" not in study.user_attrs:
            study.set_user_attr("strategy", self.strategy)
        return study

    @property
    def _name(self) -> str:
        """It hashes everything that affects a trial, so that different searches do not mix."""
        space = {k: v.model_dump() for k, v in self.space.items()}
        run = run_hash(self.recipe, self.strategy, self.seed)
        identity = json.dumps([run, space, _LR_VALUES], sort_keys=True)
        return f"{self.strategy}/{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    def announce(self, trials: int) -> None:
        """Say in the journal how many trials there will be."""
        study, plan = self.study, self.plan(self.scores(), trials)
        if study.user_attrs.get("planned") != len(plan):
            study.set_user_attr("planned", len(plan))

    @property
    def _claims(self) -> Path:
        return self.journal.parent / ".claims" / self._name

    def claim(self, trials: int) -> tuple[FileLock, optuna.Trial, Settings] | None:
        """A missing trial with its lock and settings, or ``None`` if all whose settings are known
        are finished or claimed.

        A trial of a killed process has no lock: it fails, and its index is free again. One that
        has ended its process three times, perhaps for lack of memory, counts as finished.
        """
        self._claims.mkdir(parents=True, exist_ok=True)
        with FileLock(self._claims / "all.lock"):
            for dead in self._unclaimed():
                self.study.tell(dead.number, state=TrialState.FAIL, skip_if_finished=True)
            busy = {k for k in range(trials + _EXTENSIONS) if self._is_claimed(k)}
            scores = self.scores()  # after looking at the locks, which are released later
            plan = self.plan(scores, trials)
            self.announce(trials)
            for index, settings in enumerate(plan):
                if settings is not None and index not in busy and index not in scores:
                    lock = FileLock(self._claims / f"{index}.lock")
                    lock.acquire()
                    trial = self.study.ask()
                    trial.set_user_attr("settings", settings)
                    trial.set_user_attr("index", index)
                    return lock, trial, settings
        return None

    def forgive(self) -> None:
        """Give up running trials of processes that have ended, because the user has ended them:
        these do not count as attempts."""
        if not self.exists():
            return
        self._claims.mkdir(parents=True, exist_ok=True)
        with FileLock(self._claims / "all.lock"):
            for dead in self._unclaimed():
                optuna.Trial(self.study, dead._trial_id).set_user_attr("interrupted", True)
                self.study.tell(dead.number, state=TrialState.FAIL, skip_if_finished=True)

    def _unclaimed(self) -> list[FrozenTrial]:
        """Running trials of processes that have ended."""
        running = self._trials(TrialState.RUNNING)
        return [t for t in running if not self._is_claimed(t.user_attrs.get("index", -1))]

    def _is_claimed(self, index: int) -> bool:
        return is_locked(self._claims / f"{index}.lock")

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    def scores(self) -> dict[int, float]:
        """A_T of finished trials by index; 0 of those that were pruned or failed."""
        failed = [
            trial.user_attrs.get("index", -1)
            for trial in self._trials(TrialState.FAIL)
            if not trial.user_attrs.get("interrupted")
        ]
        scores = {index: 0.0 for index in failed if failed.count(index) >= _ATTEMPTS}
        scores |= {t.user_attrs["index"]: 0.0 for t in self._trials(TrialState.PRUNED)}
        return scores | {k: float(t.value or 0.0) for k, t in self._completed().items()}

    def _completed(self) -> dict[int, FrozenTrial]:
        return {trial.user_attrs["index"]: trial for trial in self._trials(TrialState.COMPLETE)}

    def run_trial(self, trial: optuna.Trial, settings: Settings, options: RunOptions) -> str:
        """Run a claimed trial; return what has come out in words.

        A draw is pruned if its mean accuracy on the domains so far is below the median of the
        others; the grid of learning rates is not, because the draws depend on all of it.
        """
        try:
            value = self._objective(trial, settings, options)
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            return "pruned"
        self.study.tell(trial, value)
        done = f"A_T {100 * value:.2f} % on validation images, {settings}"
        return str(trial.user_attrs.get("error", done))

    def _objective(self, trial: optuna.Trial, settings: Settings, options: RunOptions) -> float:
        from covon_avalanche.experiment.run import run_strategy

        def on_domain(domains: int, accuracy: float) -> None:
            # The number of domains is added because the pruner compares the best value so far,
            # whereas accuracy falls from domain to domain.
            trial.report(domains + accuracy, domains)
            is_draw = settings.keys() != {"lr"}
            if is_draw and self.settings.kind != "joint" and trial.should_prune():
                raise optuna.TrialPruned

        try:
            recipe = with_settings(self.recipe, self.strategy, settings)
        except RecipeError as error:  # settings that do not fit one another
            trial.set_user_attr("error", f"failed: {error}")
            return 0.0
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

    # What was found ------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is a trial."""
        return bool(self.journal.exists()) and self._name in optuna.get_all_study_names(
            open_journal(self.journal)
        )

    def is_finished(self, trials: int) -> bool:
        """Whether all trials are finished."""
        scores = self.scores()
        return all(index in scores for index in range(len(self.plan(scores, trials))))

    def best(self, trials: int) -> tuple[Settings, Searched]:
        """The best trial's settings, and how they were found.

        :param trials: what was asked for; others do not count.
        :raises RecipeError: if no trial was completed, or all diverged.
        """
        if not (self.exists() and self._completed()):
            raise RecipeError(f"no trial of {self.strategy} was completed, see {self.journal}")
        scores = self.scores()
        plan = self.plan(scores, trials)
        completed = {k: s for k, s in enumerate(plan) if s is not None and k in scores}
        index = max(completed, key=lambda k: scores[k])
        if not scores[index]:
            raise RecipeError(f"all trials of {self.strategy} diverged, see {self.journal}")
        settings = completed[index]
        whole = {**flat_settings(self.settings), **settings}
        ranges = {key: space.text for key, space in self.space.items()}
        at_end = [key for key, space in self.space.items() if space.has_at_end(whole[key])]
        if "lr" in ranges:
            rates = sorted(s["lr"] for s in completed.values() if len(s) == 1)
            ranges["lr"] = f"{rates[0]:g} to {rates[-1]:g}"
            at_end = [key for key in at_end if key != "lr"]
            if not rates[0] < settings["lr"] < rates[-1]:
                at_end.insert(0, "lr")
        found = Searched(
            trials=len(completed), accuracy=scores[index], ranges=ranges, at_end=at_end
        )
        return settings, found


def run_searches(
    searches: Iterable[Search],
    trials: int,
    options: RunOptions = RunOptions(),
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Run the missing trials of searches that other processes may share, and wait for theirs.

    :param trials: per search, without those that extend its grid of learning rates.
    """
    left = list(searches)
    while left:
        for search in left:
            if (claim := search.claim(trials)) is not None:
                lock, trial, settings = claim
                try:
                    text = search.run_trial(trial, settings, options)
                finally:
                    lock.release()
                notify(f"{search.strategy}, trial {trial.user_attrs['index'] + 1}: {text}")
                break
        else:
            left = [search for search in left if not search.is_finished(trials)]
            time.sleep(_WAIT if left else 0)


def _due_to_settings(error: Exception) -> bool:
    """Whether training has diverged, or needs more memory than there is."""
    import torch

    diverged = isinstance(error, FloatingPointError | torch.linalg.LinAlgError)
    return diverged or is_out_of_memory(error)
