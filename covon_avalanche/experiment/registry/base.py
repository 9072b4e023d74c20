"""Settings that strategies share, and how they are built. Importing it does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationInfo,
    field_validator,
)

if TYPE_CHECKING:
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.templates import SupervisedTemplate
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from covon_avalanche.merging import MergeRule


class Table(BaseModel):
    """A table of a recipe: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Method:
    """The strategy class, its extra arguments and its plugins."""

    strategy: type[SupervisedTemplate]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[SupervisedPlugin, ...] = ()

    @classmethod
    def of(cls, implementation: str, arguments: Mapping[str, Any]) -> Method:
        """A strategy, or Naive with a plugin, from its class.

        :param implementation: ``module:Class``.
        :raises ValueError: if it cannot be imported or created, or is neither strategy nor plugin.
        """
        from avalanche.training.plugins import SupervisedPlugin
        from avalanche.training.supervised import Naive
        from avalanche.training.templates import SupervisedTemplate

        module, _, name = implementation.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{implementation} cannot be imported: {error}") from error
        if isinstance(found, type) and issubclass(found, SupervisedTemplate):
            return cls(found, arguments)
        if isinstance(found, type) and issubclass(found, SupervisedPlugin):
            try:
                return cls(Naive, plugins=(found(**arguments),))
            except TypeError as error:
                raise ValueError(f"{implementation} cannot be created: {error}") from error
        raise ValueError(
            f"{implementation} must be a subclass of SupervisedTemplate or SupervisedPlugin"
        )


class StrategySettings(Table):
    """The settings of a strategy, and how to build it with them. One subclass a kind.

    Subclasses name the class that they build; they override :meth:`make_optimizer` for another
    optimizer than AdamW.
    """

    kind: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0

    class_path: ClassVar[str] = "avalanche.training.supervised:Naive"
    """``module:Class`` of an Avalanche strategy, or of a plugin for Naive."""
    class_arguments: ClassVar[tuple[str, ...]] = ()
    """The settings that are arguments of this class."""
    ceiling: ClassVar[bool] = False
    """Whether it sees more than one domain at a time, so that it is no continual learner."""
    has_probabilities: ClassVar[bool] = True
    """Whether its outputs are logits. Without them NLL, Brier score and ECE mean nothing."""
    not_searched: ClassVar[frozenset[str]] = frozenset()
    """Settings with a natural scale, which are not searched over two decades by default."""

    @property
    def stores_examples(self) -> bool:
        """Whether it keeps training examples of earlier domains."""
        return False

    @property
    def optimizer_weight_decay(self) -> float:
        """The optimizer's; 0 where a plugin takes weight decay as the first prior's precision."""
        return 0.0 if "weight_decay" in self.class_arguments else self.weight_decay

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of all the model's parameters."""
        from torch.optim import AdamW

        decay = self.optimizer_weight_decay
        return AdamW(model.parameters(), lr=self.lr, weight_decay=decay, fused=True)

    def wrap_model(self, network: nn.Module, num_classes: int, x: Tensor) -> nn.Module:
        """The model to train, made from the recipe's network.

        :param x: a batch of inputs.
        """
        return network

    def build(self) -> Method:
        """The Avalanche strategy."""
        return Method.of(self.class_path, self.only(*self.class_arguments))

    def without_own_epochs(self) -> StrategySettings:
        """The same settings with the recipe's number of epochs for all domains."""
        return self

    def only(self, *names: str) -> dict[str, Any]:
        return self.model_dump(include=set(names))


class WithOptimizer(StrategySettings):
    """A method that works with any optimizer: AdamW, or SGD with momentum."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Nesterov's, with SGD."""

    @field_validator("momentum")
    @classmethod
    def _needs_sgd(cls, momentum: float, info: ValidationInfo) -> float:
        if momentum > 0 and info.data.get("optimizer") == "adamw":
            raise ValueError('needs optimizer = "sgd", got "adamw"')
        return momentum

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        if self.optimizer == "adamw":
            return super().make_optimizer(model)
        from torch.optim import SGD

        return SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.optimizer_weight_decay,
        )


class Mergeable(WithOptimizer):
    """A method whose weights may be merged with the earlier ones after each domain."""

    merge: Literal["none", "regmean", "average", "ema", "fisher"] = "none"
    """A rule of :mod:`covon_avalanche.merging`."""
    merge_gamma: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the new domain, of ``merge = "ema"``."""

    def build(self) -> Method:
        """The method with a merging plugin, which comes first: others see the merged weights."""
        method = super().build()
        if self.merge == "none":
            return method
        from covon_avalanche.plugins import MergePlugin

        plugin = MergePlugin(merge_rule(self.merge, self.merge_gamma))
        return replace(method, plugins=(plugin, *method.plugins))


def merge_rule(name: str, gamma: float) -> MergeRule:
    """The rule of this name; ``gamma`` is for ``"ema"``."""
    from covon_avalanche import merging

    if name == "ema":
        return merging.EMA(gamma)
    rules = {
        "regmean": merging.RegMean,
        "average": merging.Average,
        "fisher": merging.FisherMerge,
    }
    return rules[name]()
