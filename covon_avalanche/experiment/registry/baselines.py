"""Avalanche's own strategies, offline training, and user-defined classes."""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from covon_avalanche.experiment.registry.base import Fraction, Method, Tunable, WithOptimizer
from covon_avalanche.experiment.registry.merge_rules import Mergeable

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_STRATEGIES, _PLUGINS = "avalanche.training.supervised", "avalanche.training.plugins"


class Finetune(Mergeable, WithOptimizer):
    """Avalanche's Naive: one domain after the other."""

    kind: Literal["finetune"]


class Joint(WithOptimizer):
    """Joint training on all domains at once."""

    kind: Literal["joint"]
    offline = True
    class_path = f"{_STRATEGIES}:JointTraining"


class Cumulative(Joint):
    """Training on each domain together with all earlier ones."""

    kind: Literal["cumulative"]  # type: ignore[assignment]
    class_path = f"{_STRATEGIES}:Cumulative"


class EWC(Mergeable, WithOptimizer):
    """EWC, its penalties kept as one quadratic."""

    kind: Literal["ewc"]
    ewc_lambda: NonNegativeFloat
    class_path = "covon_avalanche.plugins:EWCPlugin"
    class_arguments = ("ewc_lambda",)


class LwF(Mergeable, WithOptimizer):
    """Learning without Forgetting."""

    kind: Literal["lwf"]
    alpha: NonNegativeFloat
    temperature: PositiveFloat = 2.0
    class_path = "covon_avalanche.plugins:LwFPlugin"
    class_arguments = ("alpha", "temperature")
    not_searched = frozenset({"temperature"})


class SI(WithOptimizer):
    """Synaptic Intelligence."""

    kind: Literal["si"]
    si_lambda: NonNegativeFloat
    xi: PositiveFloat = 0.1
    """Damping, in weight²."""
    class_path = "covon_avalanche.plugins:SIPlugin"
    class_arguments = ("si_lambda", "xi")


class MAS(WithOptimizer):
    """Memory Aware Synapses."""

    kind: Literal["mas"]
    mas_lambda: NonNegativeFloat
    class_path = "covon_avalanche.plugins:MASPlugin"
    class_arguments = ("mas_lambda",)


class RWalk(WithOptimizer):
    """Riemannian Walk."""

    kind: Literal["rwalk"]
    rwalk_lambda: NonNegativeFloat
    fisher_decay: Fraction = 0.9
    """Weight of new squared gradients in the running Fisher information."""
    delta_t: PositiveInt = 50
    """Steps between updates of the Fisher information and the scores."""
    class_path = "covon_avalanche.plugins:RWalkPlugin"
    class_arguments = ("rwalk_lambda", "fisher_decay", "delta_t")
    not_searched = frozenset({"fisher_decay", "delta_t"})


class AvalancheEWC(EWC):
    """Avalanche's EWC, one penalty per domain."""

    kind: Literal["avalanche-ewc"]  # type: ignore[assignment]
    class_path = f"{_PLUGINS}:EWCPlugin"


class AvalancheLwF(LwF):
    """Avalanche's Learning without Forgetting."""

    kind: Literal["avalanche-lwf"]  # type: ignore[assignment]
    class_path = f"{_PLUGINS}:LwFPlugin"


class AvalancheSI(WithOptimizer):
    """Avalanche's Synaptic Intelligence, which clips importances at 0.001."""

    kind: Literal["avalanche-si"]
    si_lambda: NonNegativeFloat
    class_path = "covon_avalanche.plugins:AvalancheSIPlugin"
    class_arguments = ("si_lambda",)


class UPGD(Tunable):
    """Avalanche's Naive with utility-based perturbed gradient descent."""

    kind: Literal["upgd"]
    beta_utility: Annotated[float, Field(ge=0, lt=1)] = 0.999
    sigma: NonNegativeFloat
    adam: bool | None = None
    """Scale gradients as Adam does, as deep networks need; by default not."""

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        import torch

        from covon_avalanche.optim import UPGD as Optimizer

        own = self.only("lr", "weight_decay", "beta_utility", "sigma")
        own["betas"] = (0.9, 0.999) if self.adam else None
        groups = self.parameter_groups(model, named=True)
        return Optimizer(groups, generator=torch.default_generator, **own)


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
    """A strategy of Avalanche; all other keys of its table are its arguments, numbers >= 0."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, NonNegativeInt | NonNegativeFloat]

    stores_examples: ClassVar[bool] = True

    def build(self) -> Method:
        return Method.of(self.class_path, self.model_extra or {})


class AvalancheMAS(FromAvalanche):
    """Avalanche's Memory Aware Synapses, which average importances over domains."""

    kind: Literal["avalanche-mas"]
    class_path = f"{_STRATEGIES}:MAS"
    not_searched = frozenset({"alpha"})  # at most 1
    stores_examples = False


class AvalancheRWalk(FromAvalanche):
    """Avalanche's Riemannian Walk, which trains in evaluation mode."""

    kind: Literal["avalanche-rwalk"]
    class_path = f"{_PLUGINS}:RWalkPlugin"
    not_searched = frozenset({"ewc_alpha"})  # at most 1
    stores_examples = False


class GEM(FromAvalanche):
    """Avalanche's Gradient Episodic Memory."""

    kind: Literal["gem"]
    class_path = f"{_STRATEGIES}:GEM"

    def build(self) -> Method:
        try:
            import quadprog  # noqa: F401
        except ImportError as error:
            raise ValueError("GEM needs quadprog: pip install 'covon_avalanche[gem]'") from error
        import qpsolvers  # noqa: F401  # takes seconds, which are not those of the training

        return super().build()


class AGEM(FromAvalanche):
    """Avalanche's A-GEM, whose constraint is the average gradient of the memory."""

    kind: Literal["agem"]
    class_path = f"{_STRATEGIES}:AGEM"


class DER(WithOptimizer):
    """Dark Experience Replay; DER++ with ``beta``."""

    kind: Literal["der"]
    mem_size: PositiveInt = 200
    batch_size_mem: PositiveInt | None = None
    """Stored images per step; as many as ``train_mb_size`` by default."""
    alpha: NonNegativeFloat = 0.1
    """Weight of the difference of logits."""
    beta: NonNegativeFloat = 0.5
    """Weight of the loss of stored images."""
    class_path = "covon_avalanche.plugins:DERPlugin"
    class_arguments = ("mem_size", "batch_size_mem", "alpha", "beta")
    stores_examples: ClassVar[bool] = True
    not_searched = frozenset({"batch_size_mem", "mem_size"})


class ERACE(WithOptimizer):
    """ER-ACE: replay with an asymmetric cross-entropy."""

    kind: Literal["er-ace"]
    mem_size: PositiveInt = 200
    batch_size_mem: PositiveInt | None = None
    """Stored images per step; as many as ``train_mb_size`` by default."""
    class_path = "covon_avalanche.strategies:ERACEStrategy"
    class_arguments = ("mem_size", "batch_size_mem")
    stores_examples: ClassVar[bool] = True
    not_searched = frozenset({"batch_size_mem", "mem_size"})


_imported: dict[str, str] = {}  # source hashes, because Python imports a module only once


class Custom(WithOptimizer):
    """A user-defined strategy or plugin."""

    kind: Literal["custom"]
    implementation: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """``module:Class``, found as Python finds modules and in the working directory: a subclass of
    Avalanche's ``SupervisedTemplate``, or of ``SupervisedPlugin`` (then Naive with this plugin)."""
    arguments: dict[str, JsonValue] = Field({})
    """Arguments of the class. A strategy also gets ``model``, ``optimizer`` (made of ``lr``,
    ``weight_decay``, ``optimizer`` and ``momentum``), ``criterion``, ``train_mb_size``,
    ``train_epochs``, ``eval_mb_size``, ``device``, ``plugins`` and ``evaluator`` by name. If its
    constructor makes another optimizer, the cosine schedule is that one's."""
    replay: bool = False
    """Whether it stores examples, for the tables."""
    source: Annotated[str | None, Field(validate_default=True)] = None
    """Hash of the module's file, filled in when the recipe is read, so that a changed class is
    another run. Other modules that it imports do not count."""

    @field_validator("source")
    @classmethod
    def _of_today(cls, source: str | None, info: ValidationInfo) -> str | None:
        return source or _source_hash(info.data.get("implementation", ""))

    @property
    def stores_examples(self) -> bool:
        return self.replay

    def build(self) -> Method:
        now, imported = _source_hash(self.implementation), _imported.get(self.implementation)
        if imported not in (None, now):
            raise ValueError(
                f"the file of {self.implementation} has changed since this process imported it: "
                "start again"
            )
        if self.source != now:
            raise ValueError(
                f"the recipe was run with another version of the file of {self.implementation} "
                f"(source = {self.source!r}, now {now or 'no file'!r}): restore that "
                "version, or remove source from the recipe"
            )
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        method = Method.of(self.implementation, self.arguments)
        if now is not None:
            _imported[self.implementation] = now
        return method


def _source_hash(implementation: str) -> str | None:
    """Ten hexadecimal digits of the file of ``module:Class``, found without importing anything;
    ``None`` if there is no such file."""
    first, *others = implementation.partition(":")[0].split(".")
    try:
        spec = PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first)
        for name in others:
            spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
        content = Path(spec.origin or "").read_bytes() if spec else b""
    except (ValueError, OSError):  # a module without a file
        return None
    return hashlib.sha256(content).hexdigest()[:10] if content else None
