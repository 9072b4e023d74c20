"""All strategies that recipes can name: their settings, and how to build them.

A new strategy is a subclass of :class:`StrategySettings` in one of the files here, listed below.
Nothing here imports torch before a strategy is built.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field

from covon_avalanche.experiment.registry.base import StrategySettings, Table
from covon_avalanche.experiment.registry.baselines import (
    AGEM,
    DER,
    ERACE,
    EWC,
    GEM,
    MAS,
    SI,
    UPGD,
    Cumulative,
    Custom,
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
from covon_avalanche.experiment.registry.closed_form import NCM, LayUP, RanPAC, Ridge
from covon_avalanche.experiment.registry.merging import DUCT
from covon_avalanche.experiment.registry.prompting import (
    HEDP,
    L2P,
    PINA,
    SOYO,
    CODAPrompt,
    DualPrompt,
    SLiPrompts,
    SLiPromptsMixture,
    SPrompts,
)

_Baselines = Finetune | Joint | Cumulative | EWC | LwF | SI | MAS | RWalk | UPGD | Custom
_Replay = Replay | ICaRL | GEM | AGEM | DER | ERACE
_Bayesian = CoVON | VCL | EVCL | TDVCL | AdaReg | EWCStar
_ClosedForm = NCM | Ridge | RanPAC | LayUP
_PromptPools = L2P | DualPrompt | CODAPrompt
_DomainPrompts = SPrompts | PINA | SOYO | SLiPrompts | SLiPromptsMixture | HEDP
_Any = _Baselines | _Replay | _Bayesian | _ClosedForm | _PromptPools | _DomainPrompts | DUCT
Strategy = Annotated[_Any, Field(discriminator="kind")]
KINDS: dict[str, type[StrategySettings]] = {
    kind: cls for cls in get_args(_Any) for kind in get_args(cls.model_fields["kind"].annotation)
}
"""The class of each kind."""


def stored_strategy(settings: Mapping[str, Any]) -> StrategySettings:
    """The settings of a stored result, not validated: it may be of another version."""
    return KINDS.get(settings["kind"], StrategySettings).model_construct(**settings)


__all__ = [
    "KINDS",
    "CoVON",
    "Finetune",
    "Strategy",
    "StrategySettings",
    "Table",
    "TaskSettings",
    "stored_strategy",
]
