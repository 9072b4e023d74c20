"""A user-defined strategy or plugin."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from covon_avalanche.experiment.registry.base import Method, WithOptimizer


def _module_and_class(name: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise ValueError("must look like module:Class")
    return name


def _json_compatible(arguments: dict[str, Any]) -> dict[str, Any]:
    """They are stored with the results, and are part of a run's hash."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must be finite numbers, texts, lists and tables") from None
    return arguments


class Custom(WithOptimizer):
    """A class given by its module and name."""

    kind: Literal["custom"]
    implementation: Annotated[str, AfterValidator(_module_and_class)]
    """``module:Class``, found as Python finds modules and in the working directory: a subclass of
    Avalanche's ``SupervisedTemplate``, or of ``SupervisedPlugin`` (then Naive with this plugin)."""
    arguments: Annotated[dict[str, Any], AfterValidator(_json_compatible)] = Field({})
    """Of the class. A strategy also gets ``model``, ``optimizer`` (made of ``lr``,
    ``weight_decay``, ``optimizer`` and ``momentum``), ``criterion``, ``train_mb_size``,
    ``train_epochs``, ``eval_mb_size``, ``device``, ``plugins`` and ``evaluator`` by name. If its
    constructor makes another optimizer, the cosine schedule is that one's."""
    replay: bool = False
    """Whether it stores examples, for the tables."""

    @property
    def stores_examples(self) -> bool:
        """What the recipe says."""
        return self.replay

    def build(self) -> Method:
        """The user's class, see :meth:`Method.of`."""
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return Method.of(self.implementation, self.arguments)
