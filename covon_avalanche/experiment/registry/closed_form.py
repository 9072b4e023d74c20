"""Classifiers in closed form on the features of the recipe's network, which stays frozen."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import Problem, StrategySettings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from covon_avalanche.closed_form import ClosedFormHead


class ClosedForm(StrategySettings):
    """A classifier of :mod:`covon_avalanche.closed_form`; nothing is trained by gradients."""

    lr: Annotated[PositiveFloat, Field(exclude=True)] = 1.0
    """Not used."""
    blocks: PositiveInt | None = None
    """Features of the network's last blocks, concatenated; ``None``: the last layer's input."""
    pool: Literal["mean", "mean+max"] = "mean"
    """How feature maps are pooled."""
    flip: bool | None = None
    """Learn from each image and its mirror image, and average their scores."""

    class_path = "covon_avalanche.plugins:ClosedFormPlugin"
    has_probabilities = False

    def wrap_model(self, network: nn.Module, problem: Problem, tuned: Any = ()) -> nn.Module:
        """The classifier behind the network, of which some parameters may be tuned first."""
        from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor

        features = FeatureExtractor(network, self.blocks, self.pool)
        head = self.make_head(features(problem.x).shape[1], problem.num_classes)
        return ClosedFormModel(features, head, tuned, bool(self.flip))

    @abstractmethod
    def make_head(self, width: int, num_classes: int) -> ClosedFormHead:
        """The classifier of features."""


class NCM(ClosedForm):
    """Nearest class mean."""

    kind: Literal["ncm"]

    def make_head(self, width: int, num_classes: int) -> ClosedFormHead:
        from covon_avalanche.closed_form import NearestClassMean

        return NearestClassMean(width, num_classes)


class Ridge(ClosedForm):
    """Ridge regression of one-hot labels; the ridge is chosen in each domain."""

    kind: Literal["ridge"]
    projection: PositiveInt | None = None
    """Number of random features; ``None``: the features themselves."""
    standardize: bool | None = None
    """Centre and scale the features, and fit an intercept."""
    select: Literal["mse", "accuracy"] = "mse"
    """Criterion for the ridge, on a fifth of each domain's training images."""
    folds: Annotated[int | None, Field(ge=2)] = None
    """Folds of a cross-validation that decides the ridge instead."""
    ridge_from: Literal["last", "all"] | None = None
    """The domains whose images decide; ``"last"`` by default."""

    def make_head(self, width: int, num_classes: int) -> ClosedFormHead:
        import torch

        from covon_avalanche.closed_form import RidgeClassifier

        return RidgeClassifier(
            width,
            num_classes,
            **self.only("projection", "select", "folds"),
            standardize=bool(self.standardize),
            ridge_from=self.ridge_from or "last",
            seed=int(torch.randint(2**31, (), device="cpu")),  # decided by the run's seed
        )


class RanPAC(Ridge):
    """RanPAC, with or without its first-domain adapter."""

    kind: Literal["ranpac"]  # type: ignore[assignment]
    projection: PositiveInt | None = 10_000
    adapter: PositiveInt | None = None
    """Bottleneck of adapters in a ViT's blocks, trained by SGD in the first domain, for ``epochs``
    (20 as published)."""

    def wrap_model(self, network: nn.Module, problem: Problem, tuned: Any = ()) -> nn.Module:
        if self.adapter is None:
            return super().wrap_model(network, problem)
        if self.blocks is not None:
            raise ValueError("adapter takes the features of the last layer: leave out blocks")
        from covon_avalanche.prompting import TunedViT

        adapted = TunedViT(network, "adapter", bottleneck=self.adapter, cosine=True)
        return super().wrap_model(adapted, problem, adapted.tuned_parameters())

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Optimizer of the first domain's adapter, as RanPAC's authors train it."""
        from torch.optim import SGD

        return SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


class LayUP(Ridge):
    """LayUP without its first-domain adapter."""

    kind: Literal["layup"]  # type: ignore[assignment]
    blocks: PositiveInt | None = 6
    select: Literal["mse", "accuracy"] = "accuracy"
    folds: Annotated[int | None, Field(ge=2)] = 4
