"""All strategies that recipes can name: one class a kind, with its settings and its builder.

A new strategy is a subclass of :class:`StrategySettings` in one of the files here, listed below.
Nothing here imports torch before a strategy is built.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field

from covon_avalanche.experiment.registry.base import Method, StrategySettings, Table
from covon_avalanche.experiment.registry.baselines import (
    AGEM,
    DER,
    ERACE,
    EWC,
    GEM,
    MAS,
    SI,
    Cumulative,
    Finetune,
    ICaRL,
    Joint,
    LwF,
    Replay,
    RWalk,
)
from covon_avalanche.experiment.registry.bayesian import (
    EVCL,
    TDVCL,
    VCL,
    AdaReg,
    CoVON,
    EWCStar,
    TaskSettings,
)
from covon_avalanche.experiment.registry.custom import Custom

_Any = (
    Finetune | Joint | Cumulative | Replay | DER | ERACE | GEM | AGEM | EWC | MAS | RWalk | LwF
) | (SI | EWCStar | AdaReg | VCL | EVCL | TDVCL | ICaRL | CoVON | Custom)
Strategy = Annotated[_Any, Field(discriminator="kind")]
KINDS: dict[str, type[StrategySettings]] = {
    get_args(cls.model_fields["kind"].annotation)[0]: cls for cls in get_args(_Any)
}
"""The class of each kind."""


def stored_strategy(settings: Mapping[str, Any]) -> StrategySettings:
    """The settings of a stored result, not validated: another version may have made it."""
    return KINDS.get(settings["kind"], StrategySettings).model_construct(**settings)


__all__ = [
    "KINDS",
    "CoVON",
    "Finetune",
    "Joint",
    "Method",
    "Strategy",
    "StrategySettings",
    "Table",
    "TaskSettings",
    "stored_strategy",
]
