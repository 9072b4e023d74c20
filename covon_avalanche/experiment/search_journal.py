"""The journal of searches: a file of Optuna's that several processes and machines share."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from covon_avalanche.experiment.recipe import RecipeError, load_recipe
from covon_avalanche.experiment.run_folder import is_locked

_log = logging.getLogger(__name__)
TRIAL_COLUMNS = ("strategy", "trial", "state", "accuracy", "seconds", "planned")
SUMMARY_COLUMNS = ("strategy", "trials", "running", "best A_T %", "settings", "at an end")


def open_journal(journal: Path) -> JournalStorage:
    """Optuna's storage in the file, which is created if there is none.

    :raises RecipeError: naming a damaged line.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    storage = JournalFileBackend(str(journal), _Lock(journal))
    _check_records(journal)
    return JournalStorage(storage)


def read_trials(journal: Path) -> pd.DataFrame:
    """The trials of the latest search for each strategy, one row each: :data:`TRIAL_COLUMNS` and
    the settings. ``accuracy`` is A_T on validation images, ``planned`` the number of trials that
    there will be; a strategy without any has one row. The journal is not changed.

    :raises RecipeError: naming a damaged line.
    """
    _check_records(journal)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    studies = [study for study in storage.get_all_studies() if "strategy" in study.user_attrs]
    studies.sort(key=lambda study: study.user_attrs.get("used", 0.0))
    latest = {study.user_attrs["strategy"]: study for study in studies}
    rows: list[dict[str, Any]] = []
    for strategy, study in latest.items():
        about = {"strategy": strategy, "planned": study.user_attrs.get("planned", 0)}
        trials = storage.get_all_trials(study._study_id, deepcopy=False)
        claims = journal.parent / ".claims" / study.study_name
        rows += [about | _described(trial, claims) for trial in trials] or [about]
    table = pd.DataFrame(rows)
    return table.reindex(columns=list(dict.fromkeys([*TRIAL_COLUMNS, *table])))


def search_summary(journal: Path) -> pd.DataFrame:
    """The state of each strategy's search as text, one row each, and ``seconds`` of trials to come.

    The last column, settings whose best value is at an end of what was tried, is known when the
    search has written ``best.toml``.

    :raises RecipeError: as :func:`read_trials`, or if ``best.toml`` is not a recipe.
    """
    file = journal.with_name("best.toml")
    searched = load_recipe(str(file)).searched if file.exists() else {}
    rows = []
    for strategy, own in read_trials(journal).groupby("strategy", sort=False):
        own = own[~(own["trial"] > own["planned"])]  # of a command with fewer trials
        done = own[own["state"].isin(["complete", "pruned"])]
        left = int(own["planned"].iloc[0]) - len(done)
        ordered = done.dropna(subset="accuracy").sort_values("trial")  # of equals, the first
        best = ordered.nlargest(1, "accuracy")
        found = best.drop(columns=[*TRIAL_COLUMNS]).dropna(axis=1).to_dict("records")
        known = searched.get(str(strategy))
        current = known is not None and known.accuracy in best["accuracy"].tolist()
        rows.append(
            {
                "strategy": str(strategy),
                "trials": f"{len(done)}/{len(done) + left}",
                "running": str((own["state"] == "running").sum()),
                "best A_T %": "".join(f"{100 * value:.2f}" for value in best["accuracy"]),
                "settings": ", ".join(f"{key} {v}" for row in found for key, v in row.items()),
                "at an end": ", ".join(known.at_end) if known and current else "",
                "seconds": max(0, left) * (done["seconds"].mean() if len(done) else 0.0),
            }
        )
    return pd.DataFrame(rows, columns=[*SUMMARY_COLUMNS, "seconds"])


def _described(trial: FrozenTrial, claims: Path) -> dict[str, Any]:
    completed, index = trial.state is TrialState.COMPLETE, trial.user_attrs.get("index", -1)
    dead = trial.state is TrialState.RUNNING and not is_locked(claims / f"{index}.lock")
    return {
        "trial": index + 1,
        "state": "interrupted" if dead else trial.state.name.lower(),
        "accuracy": trial.value if completed else math.nan,
        "seconds": trial.duration.total_seconds() if trial.duration else math.nan,
        **trial.user_attrs.get("settings", {}),
    }


class _Lock(JournalFileSymlinkLock):
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


def _check_records(journal: Path) -> None:
    """Raise a ``RecipeError`` naming a damaged record; the last may be incomplete."""
    records = journal.read_bytes().splitlines(keepends=True)[:-1]
    bad = next((i for i, record in enumerate(records, 1) if not _is_record(record)), None)
    if bad is not None:
        raise RecipeError(f"{journal}, line {bad}, is damaged: remove the line")


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and type(json.loads(line)["op_code"]) is int
    except (ValueError, LookupError, TypeError):
        return False
