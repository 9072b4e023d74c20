"""All strategies that recipes can name: their settings, and how to build them.

A new strategy is a subclass of :class:`StrategySettings`, with a kind, in one of the files here.
Nothing here imports torch before a strategy is built.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from covon_avalanche.experiment.registry import baselines, bayesian, closed_form, merging, prompting
from covon_avalanche.experiment.registry.base import StrategySettings, by_name

_classes = [
    cls
    for module in (baselines, bayesian, closed_form, prompting, merging)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, StrategySettings)
]
KINDS: dict[str, type[StrategySettings]] = by_name(_classes, "kind")
"""The class of each kind."""
if TYPE_CHECKING:
    Strategy = StrategySettings
else:
    _any = Union[tuple(KINDS.values())]  # noqa: UP007 -- built at run time
    Strategy = Annotated[_any, Field(discriminator="kind")]


def stored_strategy(settings: Mapping[str, Any]) -> StrategySettings:
    """The settings of a stored result, not validated: it may be of another version."""
    return KINDS.get(settings["kind"], StrategySettings).model_construct(**settings)
