"""Merge rules in recipes, and the methods that take one.

``merge = "regmean"`` is short for ``merge = { rule = "regmean" }``, which may have the rule's
arguments, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, field_validator, model_serializer

from covon_avalanche.experiment.registry.base import Fraction, Method, Table, Tunable, by_name

if TYPE_CHECKING:
    from covon_avalanche.merging import MergeRule


class MergeSettings(Table):
    """A merge rule and its arguments; ``None`` is the rule's default.

    Stored as its name alone where no argument is given.
    """

    rule: str

    @model_serializer(when_used="json")
    def _short(self) -> str | dict[str, Any]:
        given = {key: value for key, value in self if value is not None}
        return self.rule if len(given) == 1 else given

    def build(self, gamma: float) -> MergeRule | None:
        """The class of the same name in :mod:`covon_avalanche.merging`, if there is one: otherwise
        the optimizer does the slow step, or there is none.

        :param gamma: default of the rule's argument with this name, if it has one.
        """
        from covon_avalanche import merging

        rule = getattr(merging, type(self).__name__, None)
        defaults = {"gamma": gamma} if "gamma" in type(self).model_fields else {}
        given = {key: value for key, value in self if key != "rule" and value is not None}
        return rule and rule(**{**defaults, **given})


class NoMerge(MergeSettings):
    """The weights stay as training has left them; with CoVON, plain IVON."""

    rule: Literal["none"] = "none"


class Eq8(MergeSettings):
    """CoVON's own slow step."""

    rule: Literal["eq8"] = "eq8"


class Replace(MergeSettings):
    """No slow state in CoVON: the last domain alone is the next prior."""

    rule: Literal["replace"]


class Average(MergeSettings):
    """The mean of the weights over the domains."""

    rule: Literal["average"]


class EMA(MergeSettings):
    """Exponential moving average of the weights; CoMA."""

    rule: Literal["ema"]
    gamma: Fraction | None = None
    """Weight of the new domain. By default CoVON's ``gamma``, 0.4 with SLCA, otherwise 0.5."""


class FisherMerge(MergeSettings):
    """Averaging weighted by diagonal Fisher information."""

    rule: Literal["fisher"]


class CoFiMA(MergeSettings):
    """Averaging of the last two domains, weighted by diagonal Fisher information."""

    rule: Literal["cofima"]
    gamma: Fraction | None = None
    """Weight of the new domain, with the default of ``ema``."""


class MagMax(MergeSettings):
    """For each weight, the change of largest magnitude."""

    rule: Literal["magmax"]
    coefficient: PositiveFloat | None = None


class RegMean(MergeSettings):
    """Layers merged by the second moments of their inputs."""

    rule: Literal["regmean"]
    share: Fraction | None = None
    """Of the images, evenly spaced, on which the second moments are measured."""


class KFACMerge(MergeSettings):
    """RegMean that also weights outputs, by their gradients."""

    rule: Literal["kfac"]


_table = BeforeValidator(lambda merge: {"rule": merge} if isinstance(merge, str) else merge)
_ForAnyOptimizer = NoMerge | Average | EMA | FisherMerge | CoFiMA | MagMax | RegMean | KFACMerge
Merge = Annotated[_ForAnyOptimizer, Field(discriminator="rule"), _table]
CoVONMerge = Annotated[Eq8 | Replace | _ForAnyOptimizer, Field(discriminator="rule"), _table]
SLCAMerge = Annotated[NoMerge | EMA | CoFiMA, Field(discriminator="rule"), _table]
RULES: dict[str, type[MergeSettings]] = by_name(MergeSettings.__subclasses__(), "rule")


class Mergeable(Tunable):
    """A method whose weights may be merged with the earlier ones after each domain, and whose
    classifier may be retrained then."""

    merge: Merge = NoMerge()
    align_classifier: bool | None = None
    """Retrain the last layer after each domain on Gaussians of all domains' features."""

    @field_validator("align_classifier")
    @classmethod
    def _unset(cls, align: bool | None) -> bool | None:
        return align or None  # so that runs of before this setting keep their folders

    def build(self) -> Method:
        """The method after the merge, so that it sees the merged weights."""
        method = super().build()
        if (rule := self.merge.build(gamma=0.5)) is not None:
            from covon_avalanche.plugins import MergePlugin

            method = replace(method, plugins=(MergePlugin(rule), *method.plugins))
        return self.aligned(method)

    def aligned(self, method: Method) -> Method:
        """The method, and at the end of each domain the alignment of the classifier, whose layer is
        for predictions."""
        if not self.align_classifier:
            return method
        from covon_avalanche.plugins import ClassifierAlignmentPlugin

        return replace(method, plugins=(*method.plugins, ClassifierAlignmentPlugin()))
