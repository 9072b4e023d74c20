"""Prompt methods on the recipe's ViT, which stays frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import (
    DomainSettings,
    Method,
    Problem,
    WithOptimizer,
    scheduled,
)

if TYPE_CHECKING:
    from torch import nn

    from covon_avalanche.prompting import PromptModel


class PromptDomain(DomainSettings):
    """Settings of a prompt method for one domain."""

    weight_decay: NonNegativeFloat | None = None


class Prompting(WithOptimizer):
    """A method of :mod:`covon_avalanche.prompting`."""

    tuning: None = None
    tuning_size: None = None
    backbone_lr_factor: None = None
    max_grad_norm: PositiveFloat | None = None
    """Clips the gradients' common norm."""
    schedule: list[PromptDomain] | None = None
    """By domain, in the order of training."""

    class_path = "covon_avalanche.plugins:PromptPlugin"

    def build(self) -> Method:
        schedule = [task.model_dump(exclude_none=True) for task in self.schedule or ()]
        return scheduled(Method.of(self.class_path, self.only("max_grad_norm")), schedule)

    def wrap_model(self, network: nn.Module, problem: Problem) -> nn.Module:
        """The class of the same name in :mod:`covon_avalanche.prompting`, around the network."""
        from covon_avalanche import prompting

        own = type(self).model_fields.keys() - Prompting.model_fields.keys()
        method: type[PromptModel] = getattr(prompting, type(self).__name__)
        return method(network, problem.num_domains, **self.only(*own))


class SPrompts(Prompting):
    """S-iPrompts: prompts for each domain, selected by K-means."""

    kind: Literal["s-iprompts"]
    prompts: PositiveInt = 10
    """Tokens per domain."""
    centres: PositiveInt = 5
    """K-means centres per domain."""


class SOYO(Prompting):
    """SOYO."""

    kind: Literal["soyo"]
    prompts: PositiveInt = 10
    """Tokens per domain."""
    bottleneck: PositiveInt = 16
    """Width of the adapters."""
    adapter_init: Literal["xavier", "zeros"] = "xavier"
    """``"xavier"`` as published; ``"zeros"`` starts at the pretrained network."""
    context: PositiveInt | None = None
    """On a CLIP, tokens before class names, which are the classifier; ``None``: a linear one."""

    @property
    def needs_text(self) -> bool:  # type: ignore[override]
        return self.context is not None


class PINA(SOYO):
    """PINA with K-means centres."""

    kind: Literal["pina"]  # type: ignore[assignment]
    adapter: Literal["shallow", "deep"] = "deep"
    """On the final feature, or behind each block."""
    centres: PositiveInt = 5
    """K-means centres per domain."""


class SLiPrompts(SPrompts):
    """S-liPrompts, on a CLIP."""

    kind: Literal["s-liprompts"]  # type: ignore[assignment]
    context: PositiveInt = 16
    """Tokens per domain before class names."""

    needs_text = True


class SLiPromptsMixture(SLiPrompts):
    """S-liPrompts with predictions averaged over domains by their distance."""

    kind: Literal["s-liprompts-mixture"]  # type: ignore[assignment]
    temperature: PositiveFloat = 0.05
    """Temperature of the softmax over domains."""


class HEDP(SLiPrompts):
    """Prompts for images and texts with an energy regulariser, mixed by energy and distance."""

    kind: Literal["hedp"]  # type: ignore[assignment]
    regularisation: NonNegativeFloat = 0.05
    """Weight of the energy regulariser."""
    margin: float = -32.0
    """Energies above it are penalised."""
    target: float = -40.0
    """Target of the mean energy of a batch."""
    temperature: PositiveFloat = 1.0
    """Temperature of the logits in the energy."""
    energy_temperature: PositiveFloat = 0.6
    distance_temperature: PositiveFloat = 0.6
    distance: Literal["l1", "l2"] = "l2"
    """Distance between features and centres."""


class L2P(Prompting):
    """L2P: a pool of prompts, selected by the features of the image."""

    kind: Literal["l2p"]
    pool: PositiveInt = 10
    """Number of prompts."""
    length: PositiveInt = 5
    """Tokens per prompt."""
    top_k: PositiveInt = 5
    """Number of prompts that an image uses."""
    key_weight: NonNegativeFloat = 0.1
    """Weight of the loss of the keys."""
    batchwise: bool = True
    """In training, use the same prompts for all images of a batch."""
    max_grad_norm: PositiveFloat | None = 1.0

    not_searched = frozenset({"key_weight", "max_grad_norm"})


class DualPrompt(Prompting):
    """DualPrompt: a prefix that all domains share and one for each."""

    kind: Literal["dualprompt"]
    general_length: PositiveInt = 10
    """Tokens of a prefix that all domains share; half of them are keys, half are values."""
    expert_length: PositiveInt = 40
    """Tokens of a domain's prefix."""
    key_weight: NonNegativeFloat = 1.0
    """Weight of the loss of the keys."""
    max_grad_norm: PositiveFloat | None = 1.0

    not_searched = frozenset({"key_weight", "max_grad_norm"})


class CODAPrompt(Prompting):
    """CODA-Prompt: prefixes that are weighted sums of a pool."""

    kind: Literal["coda-p"]
    pool: PositiveInt = 100
    """Components per layer, of all domains."""
    length: PositiveInt = 8
    """Tokens of a component; half of them are keys, half are values."""
