"""What a recipe may say about a strategy. Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Settings(BaseModel):
    """A table of a recipe: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Trained(Settings):
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0


class WithOptimizer(_Trained):
    """Methods that are indifferent to the optimizer."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with Nesterov's momentum where that is above 0."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of SGD."""

    @field_validator("momentum")
    @classmethod
    def _of_sgd(cls, momentum: float, info: ValidationInfo) -> float:
        if momentum > 0 and info.data.get("optimizer") == "adamw":
            raise ValueError('is of optimizer = "sgd", got "adamw"')
        return momentum


class Finetune(WithOptimizer):
    """Avalanche's Naive: one domain after the other."""

    kind: Literal["finetune"]


class Joint(WithOptimizer):
    """All domains at once: the ceiling, no continual learner."""

    kind: Literal["joint"]


class Cumulative(WithOptimizer):
    """Each domain together with all before it: a ceiling, too."""

    kind: Literal["cumulative"]


class Replay(WithOptimizer):
    """Avalanche's experience replay."""

    kind: Literal["replay"]
    mem_size: PositiveInt


class DER(WithOptimizer):
    """Avalanche's Dark Experience Replay; DER++ with ``beta > 0``."""

    kind: Literal["der"]
    mem_size: PositiveInt
    alpha: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 0.5
    batch_size_mem: PositiveInt | None = None


class ERACE(WithOptimizer):
    """Avalanche's ER-ACE, replay with an asymmetric cross-entropy."""

    kind: Literal["er-ace"]
    mem_size: PositiveInt
    batch_size_mem: PositiveInt = 10


class ICaRL(WithOptimizer):
    """iCaRL for domain-incremental streams; Avalanche's is for class-incremental ones."""

    kind: Literal["icarl"]
    mem_size: PositiveInt


class GEM(WithOptimizer):
    """Avalanche's Gradient Episodic Memory."""

    kind: Literal["gem"]
    patterns_per_exp: PositiveInt
    memory_strength: NonNegativeFloat = 0.5


class AGEM(WithOptimizer):
    """Avalanche's Averaged Gradient Episodic Memory."""

    kind: Literal["agem"]
    patterns_per_exp: PositiveInt
    sample_size: PositiveInt = 64


class MAS(WithOptimizer):
    """Avalanche's Memory Aware Synapses."""

    kind: Literal["mas"]
    lambda_reg: NonNegativeFloat
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5


class RWalk(WithOptimizer):
    """Avalanche's Riemannian Walk."""

    kind: Literal["rwalk"]
    ewc_lambda: NonNegativeFloat
    ewc_alpha: Annotated[float, Field(ge=0, le=1)] = 0.9
    delta_t: PositiveInt = 10


def _module_and_class(name: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise ValueError("must look like module:Class")
    return name


def _like_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """They are stored with the results, and decide a run's folder."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must be finite numbers, texts, lists and tables") from None
    return arguments


class Custom(WithOptimizer):
    """Your own strategy or plugin."""

    kind: Literal["custom"]
    implementation: Annotated[str, AfterValidator(_module_and_class)]
    """``module:Class``, found as Python finds modules and in the working directory: a subclass of
    Avalanche's ``SupervisedTemplate``, or of ``SupervisedPlugin`` (then Naive with this plugin)."""
    arguments: Annotated[dict[str, Any], AfterValidator(_like_json)] = {}
    """Of the class. A strategy is given ``model``, ``optimizer`` (of ``lr``, ``weight_decay``,
    ``optimizer`` and ``momentum``), ``criterion``, ``train_mb_size``, ``train_epochs``,
    ``eval_mb_size``, ``device``, ``plugins`` and ``evaluator``, too, by these names. Where its
    constructor makes another optimizer, the cosine is that one's."""
    replay: bool = False
    """Whether it stores examples, for the tables."""


class EWC(WithOptimizer):
    """Avalanche's EWC, one penalty per domain."""

    kind: Literal["ewc"]
    ewc_lambda: NonNegativeFloat


class EWCStar(WithOptimizer):
    """EWC*."""

    kind: Literal["ewc-star"]
    strength: NonNegativeFloat
    fisher: Literal["exact", "batch"] = "exact"


class LwF(WithOptimizer):
    """Avalanche's Learning without Forgetting."""

    kind: Literal["lwf"]
    alpha: NonNegativeFloat
    temperature: PositiveFloat = 2.0


class SI(WithOptimizer):
    """Avalanche's Synaptic Intelligence."""

    kind: Literal["si"]
    si_lambda: NonNegativeFloat


class AdaReg(_Trained):
    """Ada-Reg with AdamW."""

    kind: Literal["ada-reg"]
    strength: NonNegativeFloat


class VCL(_Trained):
    """Mean-field VCL, Bayes by Backprop with Adam."""

    kind: Literal["vcl"]
    weight_decay: PositiveFloat
    ess: PositiveFloat
    std_init: PositiveFloat


class EVCL(VCL):
    """VCL with an elastic penalty by the Fisher information."""

    kind: Literal["evcl"]  # type: ignore[assignment]
    strength: NonNegativeFloat


class TDVCL(VCL):
    """VCL against several past posteriors. Uses replay: 2 x 200 examples by default."""

    kind: Literal["td-vcl"]  # type: ignore[assignment]
    n_steps: PositiveInt
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: the n-step form; below: TD(lambda)."""
    replay_tasks: NonNegativeInt = 2
    replay_examples: NonNegativeInt = 200
    replay_mb_size: PositiveInt = 64


class TaskSettings(Settings):
    """What a domain changes; what it leaves out stays as it was in the one before."""

    lr: PositiveFloat | None = None
    ess: PositiveFloat | None = None
    hess_init: PositiveFloat | None = None
    gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    gamma_precision: PositiveFloat | None = None
    epochs: PositiveInt | None = None


class CoVON(_Trained):
    """CoVON; ``gamma = 1`` is CoVON-NoM, ``consolidation = "none"`` plain IVON."""

    kind: Literal["covon"]
    ess: PositiveFloat | None = None
    ess_per_example: PositiveFloat | None = None
    """Instead of ``ess``: this times the training examples of each domain."""
    hess_init: PositiveFloat
    later_hess_init: PositiveFloat | None = None
    """``hess_init`` from the second domain on; the same by default."""
    gamma: Annotated[float, Field(gt=0, le=1)]
    gamma_precision: PositiveFloat | Literal["auto"] | None = None
    """``None``: ``gamma``, Eq. 8."""
    beta2: Annotated[float | None, Field(gt=0, lt=1)] = None
    """``None``: a window that grows with the task."""
    clip_radius: PositiveFloat
    prior_mean: Literal["zero", "init"] = "zero"
    """``init`` centres the first prior at the starting weights, as fine-tuning needs."""
    hess_approx: Literal["auto", "reparam", "gradsq", "per_example"] = "auto"
    consolidation: Literal["merge", "inputs", "ema", "replace", "none"] = "merge"
    """``inputs``: Eq. 8, but layers are merged by what they see, see ``CoVONPlugin``."""
    mc_samples: PositiveInt = 1
    schedule: list[TaskSettings] = []
    """Settings by domain, in order; instead of ``later_hess_init``."""

    @model_validator(mode="after")
    def _one_ess(self) -> CoVON:
        if (self.ess is None) == (self.ess_per_example is None):
            raise ValueError("give ess or ess_per_example, one of them")
        return self

    @field_validator("schedule")
    @classmethod
    def _instead(cls, schedule: list[TaskSettings], info: ValidationInfo) -> list[TaskSettings]:
        if schedule and info.data.get("later_hess_init") is not None:
            raise ValueError("stands instead of later_hess_init: give one of them")
        return schedule


_Any = (
    Finetune | Joint | Cumulative | Replay | DER | ERACE | GEM | AGEM | EWC | MAS | RWalk | LwF
) | (SI | EWCStar | AdaReg | VCL | EVCL | TDVCL | ICaRL | CoVON | Custom)
Strategy = Annotated[_Any, Field(discriminator="kind")]
KINDS: tuple[type[Settings], ...] = get_args(_Any)
CEILINGS = frozenset({"joint", "cumulative"})
"""Kinds that see more than one domain at a time, so they are no continual learners."""
_REPLAY = frozenset({"replay", "der", "er-ace", "gem", "agem", "icarl"})
NO_PROBABILITIES = frozenset({"icarl"})
"""Kinds that predict by distances: their NLL, Brier score and ECE mean nothing."""
HAS_OWN_SCALE = frozenset({"gamma", "gamma_precision", "temperature"})
"""Settings with a natural scale of their own, which are not searched over two decades."""


def stores_examples(settings: Mapping[str, Any]) -> bool:
    """Whether a strategy set so replays; of one of the user's, whether the recipe says so."""
    if settings["kind"] == "td-vcl":
        needed = {"n_steps": 2, "replay_tasks": 1, "replay_examples": 1}
        return all(settings.get(key, least) >= least for key, least in needed.items())
    return settings["kind"] in _REPLAY or bool(settings.get("replay", False))


def has_upper_bound(settings: Settings, key: str) -> bool:
    """Whether a setting, such as ``beta2``, must stay below something."""
    bounds = type(settings).model_fields[key].metadata
    return any(hasattr(bound, "le") or hasattr(bound, "lt") for bound in bounds)
