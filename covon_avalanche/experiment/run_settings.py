"""The settings of a run: those that a result stores, and those that make it another run.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from covon_avalanche.experiment.data_settings import data_folder, located
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.registry.closed_form import ClosedForm

DESCRIPTIONS = ("name", "title", "searched")
WITHOUT_EFFECT = ("workers", "eval_mb_size")  # hashed, because they always were
_OF_GRADIENTS = ("epochs", "train_mb_size", "final_lr_factor")  # without effect in closed form


def settings_of(recipe: Recipe, strategy: str) -> dict[str, Any]:
    """The part of a recipe that one of its strategies uses, without unset values."""
    unused = {"strategies", "seeds", "search"}
    whole = recipe.model_dump(mode="json", exclude=unused, exclude_none=True)
    own = recipe.strategies[strategy].model_dump(mode="json", exclude_none=True)
    return {**whole, "strategy": own}


def upgrade_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stored result in the current schema, with the defaults of newer settings.
    Settings that are no longer valid are returned unchanged."""
    one = {"seeds": [0], "strategies": {"strategy": stored["strategy"]}}
    whole = {key: value for key, value in stored.items() if key != "strategy"}
    try:
        settings = settings_of(Recipe.model_validate({**whole, **one}), "strategy")
    except ValidationError:
        return stored
    if "source" not in stored["strategy"]:  # today's file need not be the one that ran
        settings["strategy"].pop("source", None)
    return settings


def result_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the recipe's name, title and list of searched strategies."""
    return {key: value for key, value in settings.items() if key not in DESCRIPTIONS}


def without_effect(settings: dict[str, Any]) -> tuple[str, ...]:
    """Keys of settings that change no number of a run."""
    own = settings["strategy"]
    closed_form = issubclass(KINDS[own["kind"]], ClosedForm) and "adapter" not in own
    return WITHOUT_EFFECT + _OF_GRADIENTS * closed_form


def same_settings(settings: dict[str, Any], dataset_root: Path | None) -> dict[str, Any]:
    """The settings that make a run another one: without names and what has no effect, such as the
    number of workers, and with the paths of data, as ``stream.folder``, and weights resolved."""
    without = without_effect(settings)
    own = {k: v for k, v in result_settings(settings).items() if k not in without}
    stream, model = own["stream"], own["model"]
    paths = ("stream", "folder", data_folder(stream)), ("model", "weights", model.get("weights"))
    for table, key, path in paths:
        if (whole := located(dataset_root, path)) is not None:
            own[table] = {**own[table], key: str(whole.resolve())}
    return own


def run_hash(recipe: Recipe, strategy: str, seed: int) -> str:
    """Ten hexadecimal digits of what affects a result: the settings and the seed, but no names,
    other strategies or versions."""
    text = json.dumps([result_settings(settings_of(recipe, strategy)), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
