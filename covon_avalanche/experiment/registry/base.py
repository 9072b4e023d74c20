"""Settings that strategies share, and how they are built. Importing it does not import torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

if TYPE_CHECKING:
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.templates import SupervisedTemplate
    from torch import Tensor, nn
    from torch.optim import Optimizer


Count = Annotated[int, Field(ge=1, le=10**6)]
"""A positive integer; its upper bound catches typos."""
Fraction = Annotated[float, Field(gt=0, le=1)]
"""In (0, 1]."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Table(BaseModel):
    """A table of a recipe. Unknown keys are errors, and so are ``true`` or ``"3"`` for a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, strict=True, defer_build=True
    )


def by_name(classes: Iterable[type[Table]], key: str) -> dict[str, type[Any]]:
    """Tables by the names that a key of each may have, which tells them apart in a recipe."""
    return {name: cls for cls in classes for name in get_args(cls.model_fields[key].annotation)}


class DomainSettings(Table):
    """Settings of one domain in a schedule; an omitted setting keeps its previous value."""

    lr: PositiveFloat | None = None
    epochs: Count | None = None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key; lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


class Problem(NamedTuple):
    """What a model has to learn."""

    num_classes: int
    num_domains: int
    """That will be learned."""
    x: Tensor
    """A batch of inputs."""


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
    epochs: Count | None = None
    """Per domain; ``None``: the recipe's."""
    final_lr_factor: Annotated[float | None, Field(gt=0, le=1)] = None
    """``None``: the recipe's."""

    class_path: ClassVar[str] = "avalanche.training.supervised:Naive"
    """``module:Class`` of an Avalanche strategy, or of a plugin for Naive."""
    class_arguments: ClassVar[tuple[str, ...]] = ()
    """The settings that are arguments of this class."""
    offline: ClassVar[bool] = False
    """Whether it sees more than one domain at a time, so that it is no continual learner."""
    has_probabilities: ClassVar[bool] = True
    """Whether its outputs are logits. Without them NLL, Brier score and ECE mean nothing."""
    needs_text: ClassVar[bool] = False
    """Whether it needs the text tower of a CLIP, and the names of the classes."""
    not_searched: ClassVar[frozenset[str]] = frozenset()
    """Settings with a natural scale, which are not searched over two decades by default."""

    @property
    def stores_examples(self) -> bool:
        """Whether it keeps training examples of earlier domains."""
        return False

    def is_searched(self, key: str) -> bool:
        """Whether a search without ranges includes a setting: one on an unbounded scale."""
        return key not in self.not_searched and self.upper_bound(key) == math.inf

    @classmethod
    def upper_bound(cls, key: str) -> float:
        """The largest value of a setting, infinite if there is none."""
        bounds = cls.model_fields[key].metadata if key in cls.model_fields else ()
        ends = (getattr(bound, end, None) for bound in bounds for end in ("le", "lt"))
        return min((float(end) for end in ends if end is not None), default=math.inf)

    @property
    def optimizer_weight_decay(self) -> float:
        """The optimizer's; 0 where a plugin takes weight decay as the first prior's precision."""
        return 0.0 if "weight_decay" in self.class_arguments else self.weight_decay

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of all the model's parameters."""
        from torch.optim import AdamW

        decay = self.optimizer_weight_decay
        groups = self.parameter_groups(model)
        return AdamW(groups, lr=self.lr, weight_decay=decay, fused=True)

    def parameter_groups(self, model: nn.Module) -> Iterable[Any]:
        """All the model's parameters, in groups as torch's optimizers take them."""
        return model.parameters()

    def wrap_model(self, network: nn.Module, problem: Problem) -> nn.Module:
        """The model to train, made from the recipe's network."""
        return network

    def build(self) -> Method:
        """The Avalanche strategy."""
        return Method.of(self.class_path, self.only(*self.class_arguments))

    def only(self, *names: str) -> dict[str, Any]:
        return self.model_dump(include=set(names))


def scheduled(method: Method, domains: Sequence[dict[str, Any]]) -> Method:
    """The method with settings by domain, in the order of training."""
    if not domains:
        return method
    from covon_avalanche.plugins import SchedulePlugin

    return replace(method, plugins=(SchedulePlugin(domains), *method.plugins))


class Tunable(StrategySettings):
    """A method that can train all weights, or only few of a vision transformer."""

    tuning: Literal["adapter", "prompt", "head"] | None = None
    """Freeze the ViT, and train adapters or prompts and the classifier, or the classifier alone;
    ``None`` trains all weights."""
    tuning_size: PositiveInt | None = None
    """Bottleneck of adapters, 64 by default, or number of prompts, 10 by default."""
    backbone_lr_factor: PositiveFloat | None = None
    """Learning rate of all layers but the last, relative to ``lr``; ``None``: the same."""

    @field_validator("tuning_size")
    @classmethod
    def _needs_tuning(cls, size: int | None, info: ValidationInfo) -> int | None:
        tuning = info.data.get("tuning", "adapter")
        if size is not None and tuning not in ("adapter", "prompt"):
            got = "" if tuning is None else f', got "{tuning}"'
            raise ValueError(f'needs tuning = "adapter" or "prompt"{got}')
        return size

    def wrap_model(self, network: nn.Module, problem: Problem) -> nn.Module:
        if self.tuning is None:
            return network
        from covon_avalanche.prompting import TunedViT

        size = {"adapter": "bottleneck", "prompt": "prompts"}.get(self.tuning)
        options: dict[str, Any] = {size: self.tuning_size} if size and self.tuning_size else {}
        return TunedViT(network, self.tuning, **options)

    def parameter_groups(self, model: nn.Module, named: bool = False) -> list[Any]:
        """All the model's parameters; with ``backbone_lr_factor`` in two groups, the head and the
        other layers.

        :param named: with their names, which posteriors are saved by.
        """
        head = set() if self.backbone_lr_factor is None else set(self.head(model).parameters())
        inside: list[Any] = []
        others: list[Any] = []
        for name, p in model.named_parameters():
            (inside if p in head else others).append((name, p) if named else p)
        if self.backbone_lr_factor is None:
            return others
        return [{"params": inside}, {"params": others, "lr": self.backbone_lr_factor * self.lr}]

    def head(self, model: nn.Module) -> nn.Module:
        """The part that is trained with ``lr``."""
        from covon_avalanche.last_layer import last_layer

        return model.get_submodule(last_layer(model))


class WithOptimizer(Tunable):
    """A method that works with any optimizer: AdamW, or SGD with momentum."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD."""

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
            self.parameter_groups(model),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.optimizer_weight_decay,
        )
