"""A strategy or plugin of the user's."""

from __future__ import annotations

import importlib
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
    """They are stored with the results, and decide a run's folder."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must be finite numbers, texts, lists and tables") from None
    return arguments


class Custom(WithOptimizer):
    """Your own strategy or plugin."""

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
        """The user's class.

        :raises ValueError: if it cannot be imported or made, or is neither strategy nor plugin.
        """
        from avalanche.training.plugins import SupervisedPlugin
        from avalanche.training.supervised import Naive
        from avalanche.training.templates import SupervisedTemplate

        module, _, name = self.implementation.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.implementation} cannot be imported: {error}") from error
        if isinstance(cls, type) and issubclass(cls, SupervisedTemplate):
            return Method(cls, dict(self.arguments))
        if isinstance(cls, type) and issubclass(cls, SupervisedPlugin):
            try:
                return Method(Naive, plugins=(cls(**self.arguments),))
            except TypeError as error:
                raise ValueError(f"{self.implementation} cannot be made: {error}") from error
        raise ValueError(
            f"{self.implementation} must be a subclass of SupervisedTemplate or SupervisedPlugin"
        )
