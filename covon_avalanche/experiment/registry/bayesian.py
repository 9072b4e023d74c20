"""CoVON and its relatives: VCL, EVCL, TD-VCL, Ada-Reg, EWC*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from covon_avalanche.experiment.registry.base import (
    DomainSettings,
    Fraction,
    Method,
    Tunable,
    WithOptimizer,
    scheduled,
)
from covon_avalanche.experiment.registry.merge_rules import CoVONMerge, Eq8, Mergeable
from covon_avalanche.presets import CLIP_RADIUS, FINETUNING, FROM_SCRATCH, PERCEPTRON, REPARAM

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


PRESETS = {"finetune": FINETUNING, "scratch": FROM_SCRATCH, "perceptron": PERCEPTRON}


class CoVONDomain(DomainSettings):
    """Settings of CoVON for one domain."""

    ess: PositiveFloat | None = None
    hess_init: PositiveFloat | None = None
    gamma: Fraction | None = None
    gamma_precision: PositiveFloat | None = None


class CoVON(Mergeable):
    """CoVON; ``gamma = 1`` is CoVON-NoM, ``merge = "none"`` plain IVON."""

    kind: Literal["covon"]
    preset: Literal["finetune", "scratch", "perceptron"] | None = Field(None, exclude=True)
    """Sets what is not given; the settings are stored, not the preset. ``finetune``, for pretrained
    networks, ``scratch``, for random weights, and ``perceptron``, for multilayer perceptrons
    that classify, are the presets of ``covon_avalanche.presets``: only ``lr`` is needed."""
    noise: PositiveFloat | None = None
    """Scale of the first samples, relative to the weights. With it ``lr`` is as AdamW's; without
    it settings have the paper's units."""
    prior_width: PositiveFloat | None = None
    data_precision: PositiveFloat | None = None
    ess: PositiveFloat | None = None
    ess_per_example: PositiveFloat | None = None
    """Instead of ``ess``: this times the training examples of each domain."""
    hess_init: PositiveFloat | None = None
    later_hess_init: PositiveFloat | None = None
    """``hess_init`` from the second domain on; the same by default."""
    gamma: Fraction
    gamma_precision: PositiveFloat | None = None
    """``None``: ``gamma``, Eq. 8."""
    beta2: Annotated[float | None, Field(gt=0, lt=1)] = None
    """``None``: the averaging window grows with the task."""
    clip_radius: PositiveFloat
    prior_mean: Literal["zero", "init"] = "zero"
    """``init`` centres the first prior at the starting weights, as fine-tuning needs."""
    bfloat16_prior: bool | None = None
    """``true`` keeps the prior in bfloat16: four tensors of the size of the weights, not five."""
    hess_approx: Literal["gradsq", "reparam"] = "gradsq"
    merge: CoVONMerge = Eq8()  # type: ignore[assignment]
    """The slow step: Eq. 8, another rule for the mean (the precision is Eq. 8's), no slow state
    (``replace``), or none. The coefficient of another rule is ``gamma``, unless ``merge.gamma`` is
    given, which leaves ``gamma`` to the precision alone."""
    mc_samples: PositiveInt = 1
    schedule: list[CoVONDomain] = Field([])
    """Settings by domain, in order; instead of ``later_hess_init``."""

    not_searched = frozenset({"gamma", "gamma_precision", "noise", "prior_width", "data_precision"})

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.keys() <= {"kind", "lr", "merge"}:
            raise ValueError(f"needs a preset, one of {', '.join(PRESETS)}, or gamma, ess and more")
        if (preset := PRESETS.get(data.get("preset", ""))) is not None:
            del data["preset"]
            if data.get("hess_approx") == "reparam":
                preset = preset | REPARAM
            data = {"clip_radius": CLIP_RADIUS, **preset, **data}
        return data

    @property
    def relative(self) -> bool:
        """Whether settings are relative to the weights, not in the paper's units."""
        return self.noise is not None

    @model_validator(mode="after")
    def _one_kind_of_units(self) -> CoVON:
        relative = {"noise", "prior_width", "data_precision"}
        papers = {"ess", "hess_init", "later_hess_init"}
        given = self.model_fields_set & {k for k, v in self if v is not None}
        if self.relative:
            if given & papers:
                raise ValueError(
                    f"{', '.join(sorted(given & papers))} have the paper's units, noise is "
                    "relative to the weights: give settings of one kind"
                )
            if self.prior_width is None or self.data_precision is None:
                raise ValueError(
                    'noise needs prior_width and data_precision, or preset = "finetune"'
                )
            return self
        if given & relative:
            raise ValueError(f"{', '.join(sorted(given & relative))} needs noise")
        if self.hess_init is None:
            raise ValueError('give hess_init and ess, or a preset such as "finetune"')
        if (self.ess is None) == (self.ess_per_example is None):
            raise ValueError("give ess or ess_per_example, one of them")
        return self

    @field_validator("schedule")
    @classmethod
    def _instead(cls, schedule: list[CoVONDomain], info: ValidationInfo) -> list[CoVONDomain]:
        if schedule and info.data.get("later_hess_init") is not None:
            raise ValueError("replaces later_hess_init: give one of them")
        if info.data.get("backbone_lr_factor") and any(task.lr for task in schedule):
            raise ValueError("cannot set lr together with backbone_lr_factor")
        if info.data.get("ess_per_example") and any(task.ess for task in schedule):
            raise ValueError("cannot set ess together with ess_per_example")
        merge: Any = info.data.get("merge")
        if getattr(merge, "gamma", 1.0) is None and any(task.gamma for task in schedule):
            raise ValueError(f'cannot change gamma, which merge = "{merge.rule}" fixes')
        return schedule

    def is_searched(self, key: str) -> bool:
        """Relative to the weights, the learning rate and the knob are."""
        return key in ("lr", "gamma") if self.relative else super().is_searched(key)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        import torch

        from covon_avalanche.optim import CoVON as Optimizer

        own = self.only("lr", "gamma", "gamma_precision", "clip_radius", "prior_mean")
        own |= self.only("hess_approx", "mc_samples", "weight_decay")
        own |= {"bfloat16_prior": bool(self.bfloat16_prior), **self.only("ess_per_example")}
        if self.relative:
            own |= self.only("noise", "prior_width", "data_precision")
        else:
            own |= self.only("ess", "hess_init")
        return Optimizer(
            self.parameter_groups(model, named=True),
            betas=(0.9, self.beta2),
            generator=torch.default_generator,
            **own,
        )

    def build(self) -> Method:
        schedule: list[dict[str, Any]] = []
        if not self.relative:
            later = self.later_hess_init or self.hess_init
            schedule = [{"hess_init": self.hess_init}, {"hess_init": later}]
        if self.schedule:
            schedule = [task.model_dump(exclude_none=True) for task in self.schedule]
        rule = self.merge.build(self.gamma)
        arguments = {"merge": self.merge.rule if rule is None else rule}
        method = Method.of("covon_avalanche.plugins:CoVONPlugin", arguments)
        return self.aligned(scheduled(method, schedule))


class Variational(Tunable):
    """Bayes by Backprop with Adam."""

    weight_decay: PositiveFloat
    ess: PositiveFloat
    std_init: PositiveFloat
    mc_samples: PositiveInt | None = None
    """Posterior samples per step, 1 by default; the authors of VCL use 10."""

    not_searched = frozenset({"mc_samples"})

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        import torch

        from covon_avalanche.optim import BayesByBackprop

        own = self.only("lr", "ess", "std_init", "weight_decay")
        own["mc_samples"] = self.mc_samples or 1
        groups = self.parameter_groups(model, named=True)
        return BayesByBackprop(groups, generator=torch.default_generator, **own)


class VCL(Variational):
    """Mean-field VCL."""

    kind: Literal["vcl"]
    class_path = "covon_avalanche.plugins:VCLPlugin"


class EVCL(Variational):
    """VCL with an elastic penalty by the Fisher information."""

    kind: Literal["evcl"]
    strength: NonNegativeFloat
    class_path = "covon_avalanche.plugins:EVCLPlugin"
    class_arguments = ("strength",)


class TDVCL(Variational):
    """VCL against several past posteriors. Uses replay: 2 x 200 examples by default."""

    kind: Literal["td-vcl"]
    n_steps: PositiveInt
    decay: Fraction = 1.0
    """1: the n-step form; below: TD(lambda)."""
    replay_tasks: NonNegativeInt = 2
    replay_examples: NonNegativeInt = 200
    replay_mb_size: PositiveInt = 64

    class_path = "covon_avalanche.plugins:TDVCLPlugin"
    class_arguments = ("n_steps", "decay", "replay_tasks", "replay_examples", "replay_mb_size")

    @property
    def stores_examples(self) -> bool:
        """Only the n-step objective uses the memory."""
        return self.n_steps >= 2 and min(self.replay_tasks, self.replay_examples) >= 1


class AdaReg(Mergeable):
    """Ada-Reg with AdamW. Weight decay is the first prior's precision."""

    kind: Literal["ada-reg"]
    strength: NonNegativeFloat
    class_path = "covon_avalanche.plugins:AdaRegPlugin"
    class_arguments = ("strength", "weight_decay")


class EWCStar(WithOptimizer):
    """EWC*. Weight decay is the first prior's precision."""

    kind: Literal["ewc-star"]
    strength: NonNegativeFloat
    fisher: Literal["exact", "batch"] = "exact"
    class_path = "covon_avalanche.plugins:EWCStarPlugin"
    class_arguments = ("strength", "weight_decay", "fisher")
