"""Strategies and plugins that are named by their class: Avalanche's, and user-defined ones."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

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
    """A user-defined strategy or plugin."""

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
        """The user's class; see :func:`_method`."""
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return _method(self.implementation, self.arguments)


class FromAvalanche(WithOptimizer):
    """A strategy of Avalanche that takes all other keys of its table as arguments."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["mas", "rwalk", "gem", "agem", "der", "er-ace"]

    @property
    def stores_examples(self) -> bool:
        return self.kind not in ("mas", "rwalk")

    def build(self) -> Method:
        """The class, with the arguments of the recipe; see :func:`_method`."""
        return _method(_CLASSES[self.kind], self.model_extra or {})


_CLASSES = {
    "mas": "avalanche.training.supervised:MAS",
    "rwalk": "avalanche.training.plugins:RWalkPlugin",
    "gem": "avalanche.training.supervised:GEM",
    "agem": "avalanche.training.supervised:AGEM",
    "der": "avalanche.training.supervised:DER",
    "er-ace": "avalanche.training.supervised:ER_ACE",
}


def _method(implementation: str, arguments: Mapping[str, Any]) -> Method:
    """A strategy, or Naive with a plugin, from ``module:Class`` and its arguments.

    :raises ValueError: if it cannot be imported or created, or is neither strategy nor plugin.
    """
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.supervised import Naive
    from avalanche.training.templates import SupervisedTemplate

    module, _, name = implementation.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{implementation} cannot be imported: {error}") from error
    if isinstance(cls, type) and issubclass(cls, SupervisedTemplate):
        return Method(cls, arguments)
    if isinstance(cls, type) and issubclass(cls, SupervisedPlugin):
        try:
            return Method(Naive, plugins=(cls(**arguments),))
        except TypeError as error:
            raise ValueError(f"{implementation} cannot be created: {error}") from error
    raise ValueError(
        f"{implementation} must be a subclass of SupervisedTemplate or SupervisedPlugin"
    )
