"""Classifiers in closed form on the features of the recipe's network, which stays frozen."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import StrategySettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from covon_avalanche.closed_form import ClosedFormHead


class ClosedForm(StrategySettings):
    """A classifier of :mod:`covon_avalanche.closed_form`; nothing is trained by gradients."""

    lr: Annotated[PositiveFloat, Field(exclude=True)] = 1.0
    """Not used."""
    blocks: PositiveInt | None = None
    """Features of the network's last blocks, concatenated; ``None``: the last layer's input."""
    pool: Literal["mean", "mean+max"] = "mean"
    """How feature maps are pooled."""

    class_path = "covon_avalanche.plugins:ClosedFormPlugin"
    has_probabilities = False

    def wrap_model(self, network: nn.Module, num_classes: int, x: Tensor) -> nn.Module:
        from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor

        features = FeatureExtractor(network, self.blocks, self.pool)
        return ClosedFormModel(features, self.make_head(features(x).shape[1], num_classes))

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
    select: Literal["mse", "accuracy"] = "mse"
    """What decides the ridge, on a fifth of each domain's training images."""

    def make_head(self, width: int, num_classes: int) -> ClosedFormHead:
        import torch

        from covon_avalanche.closed_form import RidgeClassifier

        return RidgeClassifier(
            width,
            num_classes,
            projection=self.projection,
            select=self.select,
            seed=int(torch.randint(2**31, ())),  # decided by the run's seed
        )


class RanPAC(Ridge):
    """RanPAC without its first-domain adapter."""

    kind: Literal["ranpac"]  # type: ignore[assignment]
    projection: PositiveInt | None = 10_000


class LayUP(Ridge):
    """LayUP without its first-domain adapter."""

    kind: Literal["layup"]  # type: ignore[assignment]
    blocks: PositiveInt | None = 6
    select: Literal["mse", "accuracy"] = "accuracy"
