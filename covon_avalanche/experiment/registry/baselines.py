"""Avalanche's own strategies, and bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

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


class Joint(WithOptimizer):
    """All domains at once: the ceiling, no continual learner."""

    kind: Literal["joint"]
    ceiling: ClassVar[bool] = True

    def build(self) -> Method:
        from avalanche.training.supervised import JointTraining

        return Method(JointTraining)


class Cumulative(WithOptimizer):
    """Each domain together with all before it: a ceiling, too."""

    kind: Literal["cumulative"]
    ceiling: ClassVar[bool] = True

    def build(self) -> Method:
        from avalanche.training.supervised import Cumulative as Strategy

        return Method(Strategy)


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


class MAS(WithOptimizer):
    """Avalanche's Memory Aware Synapses."""

    kind: Literal["mas"]
    lambda_reg: NonNegativeFloat
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import MASPlugin

        return [MASPlugin(self.lambda_reg, self.alpha)]


class RWalk(WithOptimizer):
    """Avalanche's Riemannian Walk."""

    kind: Literal["rwalk"]
    ewc_lambda: NonNegativeFloat
    ewc_alpha: Annotated[float, Field(ge=0, le=1)] = 0.9
    delta_t: PositiveInt = 10

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import RWalkPlugin

        return [RWalkPlugin(**self.only("ewc_lambda", "ewc_alpha", "delta_t"))]


class WithMemory(WithOptimizer):
    """A method that keeps training examples of earlier domains."""

    @property
    def stores_examples(self) -> bool:
        return True


class Replay(WithMemory):
    """Avalanche's experience replay."""

    kind: Literal["replay"]
    mem_size: PositiveInt

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import ReplayPlugin

        return [ReplayPlugin(self.mem_size)]


class DER(WithMemory):
    """Avalanche's Dark Experience Replay; DER++ with ``beta > 0``."""

    kind: Literal["der"]
    mem_size: PositiveInt
    alpha: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 0.5
    batch_size_mem: PositiveInt | None = None

    def build(self) -> Method:
        from avalanche.training.supervised import DER as Strategy

        return Method(Strategy, self.only("mem_size", "alpha", "beta", "batch_size_mem"))


class ERACE(WithMemory):
    """Avalanche's ER-ACE, replay with an asymmetric cross-entropy."""

    kind: Literal["er-ace"]
    mem_size: PositiveInt
    batch_size_mem: PositiveInt = 10

    def build(self) -> Method:
        from avalanche.training.supervised import ER_ACE

        return Method(ER_ACE, self.only("mem_size", "batch_size_mem"))


class ICaRL(WithMemory):
    """iCaRL for domain-incremental streams; Avalanche's is for class-incremental ones."""

    kind: Literal["icarl"]
    mem_size: PositiveInt
    has_probabilities: ClassVar[bool] = False

    def plugins(self) -> list[SupervisedPlugin]:
        from covon_avalanche.plugins import ICaRLPlugin

        return [ICaRLPlugin(self.mem_size)]


class GEM(WithMemory):
    """Avalanche's Gradient Episodic Memory."""

    kind: Literal["gem"]
    patterns_per_exp: PositiveInt
    memory_strength: NonNegativeFloat = 0.5

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import GEMPlugin

        return [GEMPlugin(self.patterns_per_exp, self.memory_strength)]


class AGEM(WithMemory):
    """Avalanche's Averaged Gradient Episodic Memory."""

    kind: Literal["agem"]
    patterns_per_exp: PositiveInt
    sample_size: PositiveInt = 64

    def plugins(self) -> list[SupervisedPlugin]:
        from avalanche.training.plugins import AGEMPlugin

        return [AGEMPlugin(self.patterns_per_exp, self.sample_size)]
