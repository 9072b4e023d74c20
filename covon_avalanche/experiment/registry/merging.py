"""Methods that fine-tune a pretrained network on each domain and merge the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from covon_avalanche.experiment.registry.base import Fraction, Method, Problem, WithOptimizer
from covon_avalanche.experiment.registry.merge_rules import NoMerge, SLCAMerge

if TYPE_CHECKING:
    from torch import nn


class DomainHeads(WithOptimizer):
    """A network with a classifier for each domain."""

    tuning: None = None
    tuning_size: None = None
    weight_decay: NonNegativeFloat = 5e-4
    optimizer: Literal["adamw", "sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default_factory=lambda known: 0.9 if known.get("optimizer") == "sgd" else 0.0
    )
    backbone_lr_factor: PositiveFloat | None = 0.01

    def head(self, model: nn.Module) -> nn.Module:
        head: Any = model.head
        return head


class DUCT(DomainHeads):
    """DUCT, with the published settings as defaults."""

    kind: Literal["duct"]
    lr: PositiveFloat = 0.1
    """Learning rate of the classifier."""
    alpha: Fraction = 0.25
    """Weight of each domain's change of the backbone."""
    retrain_epochs: NonNegativeInt = 5
    """Epochs that retrain the classifier on the merged backbone."""
    retrain_lr: PositiveFloat = 0.1

    class_path = "covon_avalanche.plugins:DUCTPlugin"
    class_arguments = ("retrain_epochs", "retrain_lr")

    def wrap_model(self, network: nn.Module, problem: Problem) -> nn.Module:
        from covon_avalanche.merging import DUCT as Model

        return Model(network, problem.num_classes, problem.num_domains, alpha=self.alpha)


class SLCA(DomainHeads):
    """SLCA and, with a merge, CoMA and CoFiMA, with the published settings as defaults."""

    kind: Literal["slca"]
    lr: PositiveFloat = 0.01
    """Learning rate of the classifier."""
    merge: SLCAMerge = NoMerge()
    """After each domain: ``"ema"`` is CoMA, ``"cofima"`` CoFiMA."""
    covariance: Literal["class", "domain"] = "class"
    """One covariance for each class, or one for all classes of a domain."""

    class_path = "covon_avalanche.plugins:SLCAPlugin"

    def wrap_model(self, network: nn.Module, problem: Problem) -> nn.Module:
        from covon_avalanche.merging import SLCA as Model

        return Model(network, problem.num_classes, problem.num_domains)

    def build(self) -> Method:
        rule = self.merge.build(gamma=0.4)
        return Method.of(self.class_path, {"rule": rule, "per_class": self.covariance == "class"})
