"""Avalanche's own strategies, and bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import (
    Mergeable,
    Method,
    WithOptimizer,
)

if TYPE_CHECKING:
    from avalanche.training.plugins import SupervisedPlugin


class Finetune(Mergeable):
    """Avalanche's Naive: one domain after the other."""

    kind: Literal["finetune"]

    def plugins(self) -> list[SupervisedPlugin]:
        return self.merge_plugins()


class Ceiling(WithOptimizer):
    """All domains at once, or each together with all before it: upper bounds."""

    kind: Literal["joint", "cumulative"]
    ceiling: ClassVar[bool] = True

    def build(self) -> Method:
        from avalanche.training.supervised import Cumulative, JointTraining

        return Method(JointTraining if self.kind == "joint" else Cumulative)


class EWC(Mergeable):
    """Avalanche's EWC, one penalty per domain."""

    kind: Literal["ewc"]
    ewc_lambda: NonNegativeFloat

    def build(self) -> Method:
        from avalanche.training.supervised import EWC as Strategy

        return Method(Strategy, {"ewc_lambda": self.ewc_lambda}, tuple(self.merge_plugins()))


class LwF(Mergeable):
    """Avalanche's Learning without Forgetting."""

    kind: Literal["lwf"]
    alpha: NonNegativeFloat
    temperature: PositiveFloat = 2.0
    not_searched: ClassVar[frozenset[str]] = frozenset({"temperature"})

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import LwFPlugin

        return [*self.merge_plugins(), LwFPlugin(self.alpha, self.temperature)]


class SI(WithOptimizer):
    """Avalanche's Synaptic Intelligence."""

    kind: Literal["si"]
    si_lambda: NonNegativeFloat

    def plugins(self) -> list[SupervisedPlugin]:
        from covon_avalanche.plugins import SIPlugin

        return [SIPlugin(si_lambda=self.si_lambda)]


class Replay(WithOptimizer):
    """Avalanche's experience replay."""

    kind: Literal["replay"]
    mem_size: PositiveInt
    stores_examples: ClassVar[bool] = True

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import ReplayPlugin

        return [ReplayPlugin(self.mem_size)]


class ICaRL(WithOptimizer):
    """iCaRL for domain-incremental streams; Avalanche's is for class-incremental ones."""

    kind: Literal["icarl"]
    mem_size: PositiveInt
    stores_examples: ClassVar[bool] = True
    has_probabilities: ClassVar[bool] = False

    def plugins(self) -> list[SupervisedPlugin]:
        from covon_avalanche.plugins import ICaRLPlugin

        return [ICaRLPlugin(self.mem_size)]
