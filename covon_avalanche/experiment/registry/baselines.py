"""Avalanche's own strategies, and upper bounds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import Mergeable, Method, WithOptimizer

_STRATEGIES, _PLUGINS = "avalanche.training.supervised", "avalanche.training.plugins"


class Finetune(Mergeable):
    """Avalanche's Naive: one domain after the other."""

    kind: Literal["finetune"]


class Ceiling(WithOptimizer):
    """All domains at once, or each together with all before it: upper bounds."""

    kind: Literal["joint", "cumulative"]
    ceiling = True

    def build(self) -> Method:
        name = "JointTraining" if self.kind == "joint" else "Cumulative"
        return Method.of(f"{_STRATEGIES}:{name}", {})


class EWC(Mergeable):
    """Avalanche's EWC, one penalty per domain."""

    kind: Literal["ewc"]
    ewc_lambda: NonNegativeFloat
    class_path = f"{_STRATEGIES}:EWC"
    class_arguments = ("ewc_lambda",)


class LwF(Mergeable):
    """Avalanche's Learning without Forgetting."""

    kind: Literal["lwf"]
    alpha: NonNegativeFloat
    temperature: PositiveFloat = 2.0
    class_path = f"{_PLUGINS}:LwFPlugin"
    class_arguments = ("alpha", "temperature")
    not_searched = frozenset({"temperature"})


class SI(WithOptimizer):
    """Avalanche's Synaptic Intelligence."""

    kind: Literal["si"]
    si_lambda: NonNegativeFloat
    class_path = "covon_avalanche.plugins:SIPlugin"
    class_arguments = ("si_lambda",)


class Replay(WithOptimizer):
    """Avalanche's experience replay."""

    kind: Literal["replay"]
    mem_size: PositiveInt
    class_path = f"{_PLUGINS}:ReplayPlugin"
    class_arguments = ("mem_size",)
    stores_examples: ClassVar[bool] = True


class ICaRL(Replay):
    """iCaRL for domain-incremental streams; Avalanche's is for class-incremental ones."""

    kind: Literal["icarl"]  # type: ignore[assignment]
    class_path = "covon_avalanche.plugins:ICaRLPlugin"
    has_probabilities = False


class FromAvalanche(WithOptimizer):
    """A strategy of Avalanche that takes all other keys of its table as arguments."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["mas", "rwalk", "gem", "agem", "der", "er-ace"]

    @property
    def stores_examples(self) -> bool:
        return self.kind not in ("mas", "rwalk")

    def build(self) -> Method:
        return Method.of(_FROM_AVALANCHE[self.kind], self.model_extra or {})


_FROM_AVALANCHE = {
    "mas": f"{_STRATEGIES}:MAS",
    "rwalk": f"{_PLUGINS}:RWalkPlugin",
    "gem": f"{_STRATEGIES}:GEM",
    "agem": f"{_STRATEGIES}:AGEM",
    "der": f"{_STRATEGIES}:DER",
    "er-ace": f"{_STRATEGIES}:ER_ACE",
}
