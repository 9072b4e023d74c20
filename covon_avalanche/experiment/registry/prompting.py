"""Prompt methods on the recipe's ViT, which stays frozen."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from covon_avalanche.experiment.registry.base import WithOptimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from covon_avalanche.prompting import PromptModel


class Prompting(WithOptimizer):
    """A method of :mod:`covon_avalanche.prompting`."""

    tuning: None = None
    tuning_size: None = None
    backbone_lr_factor: None = None
    max_grad_norm: PositiveFloat | None = None
    """Clips the gradients' common norm."""

    class_path = "covon_avalanche.plugins:PromptPlugin"
    class_arguments = ("max_grad_norm",)

    def wrap_model(
        self, network: nn.Module, num_classes: int, num_domains: int, x: Tensor
    ) -> nn.Module:
        return self.make_model(network, num_domains)

    @abstractmethod
    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        """The method around the network."""


class SPrompts(Prompting):
    """S-iPrompts: prompts for each domain, selected by K-means."""

    kind: Literal["s-iprompts"]
    prompts: PositiveInt = 10
    """Tokens per domain."""
    centres: PositiveInt = 5
    """K-means centres per domain."""

    not_searched = frozenset({"prompts", "centres"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import SPrompts

        return SPrompts(network, num_domains, **self.only("prompts", "centres"))


class PINA(Prompting):
    """PINA with K-means centres."""

    kind: Literal["pina"]
    prompts: PositiveInt = 10
    """Tokens per domain."""
    adapter: Literal["shallow", "deep"] = "deep"
    """On the final feature, or behind each block."""
    bottleneck: PositiveInt = 16
    """Of adapters."""
    adapter_init: Literal["xavier", "zeros"] = "xavier"
    """``"xavier"`` as published; ``"zeros"`` starts at the pretrained network."""
    centres: PositiveInt = 5
    """K-means centres per domain."""

    not_searched = frozenset({"prompts", "adapter", "bottleneck", "adapter_init", "centres"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import PINA

        own = self.only("prompts", "adapter", "bottleneck", "adapter_init", "centres")
        return PINA(network, num_domains, **own)


class SOYO(Prompting):
    """SOYO, or its parameters with another selector."""

    kind: Literal["soyo"]
    prompts: PositiveInt = 10
    """Tokens per domain."""
    bottleneck: PositiveInt = 16
    """Of adapters."""
    adapter_init: Literal["xavier", "zeros"] = "xavier"
    """``"xavier"`` as published; ``"zeros"`` starts at the pretrained network."""
    selector: Literal["mixture", "lda"] = "mixture"
    """SOYO's, or linear discriminant analysis."""

    not_searched = frozenset({"prompts", "bottleneck", "adapter_init", "selector"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import SOYO

        own = self.only("prompts", "bottleneck", "adapter_init", "selector")
        return SOYO(network, num_domains, **own)


class SLiPrompts(Prompting):
    """S-liPrompts, on a CLIP."""

    kind: Literal["s-liprompts"]
    prompts: PositiveInt = 10
    """Tokens per domain in the image tower."""
    context: PositiveInt = 16
    """Tokens per domain before class names."""
    centres: PositiveInt = 5
    """K-means centres per domain."""

    needs_text = True
    not_searched = frozenset({"prompts", "context", "centres"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import SLiPrompts

        return SLiPrompts(network, num_domains, **self.only("prompts", "context", "centres"))


class SLiPromptsMixture(SLiPrompts):
    """S-liPrompts with predictions averaged over domains by their distance."""

    kind: Literal["s-liprompts-mixture"]  # type: ignore[assignment]
    temperature: PositiveFloat = 0.05
    """Of the domains' weights."""

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import SLiPromptsMixture

        own = self.only("prompts", "context", "centres", "temperature")
        return SLiPromptsMixture(network, num_domains, **own)


class HEDP(SLiPrompts):
    """S-liPrompts with an energy regulariser, mixed by energy and distance."""

    kind: Literal["hedp"]  # type: ignore[assignment]
    regularisation: NonNegativeFloat = 0.05
    """Weight of the energy regulariser."""
    margin: float = -32.0
    """Energies above it are penalised."""
    target: float = -40.0
    """Of the mean energy of a batch."""
    energy_temperature: PositiveFloat = 0.6
    distance_temperature: PositiveFloat = 0.6

    not_searched = SLiPrompts.not_searched | {"margin", "target"}

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import HEDP

        own = ("regularisation", "margin", "target", "energy_temperature", "distance_temperature")
        return HEDP(network, num_domains, **self.only("prompts", "context", "centres", *own))


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

    not_searched = frozenset({"pool", "length", "top_k", "key_weight", "max_grad_norm"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import L2P

        options = self.only("pool", "length", "top_k", "key_weight", "batchwise")
        return L2P(network, num_domains, **options)


class DualPrompt(Prompting):
    """DualPrompt: a prefix that all domains share and one for each."""

    kind: Literal["dualprompt"]
    general_length: PositiveInt = 6
    """Tokens of a prefix that all domains share; half of them are keys, half are values."""
    expert_length: PositiveInt = 20
    """Tokens of a domain's prefix."""
    key_weight: NonNegativeFloat = 1.0
    """Weight of the loss of the keys."""

    not_searched = frozenset({"general_length", "expert_length", "key_weight"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import DualPrompt

        options = self.only("general_length", "expert_length", "key_weight")
        return DualPrompt(network, num_domains, **options)


class CODAPrompt(Prompting):
    """CODA-Prompt: prefixes that are weighted sums of a pool."""

    kind: Literal["coda-p"]
    pool: PositiveInt = 100
    """Components per layer, of all domains."""
    length: PositiveInt = 8
    """Tokens of a component; half of them are keys, half are values."""

    not_searched = frozenset({"pool", "length"})

    def make_model(self, network: nn.Module, num_domains: int) -> PromptModel:
        from covon_avalanche.prompting import CODAPrompt

        return CODAPrompt(network, num_domains, **self.only("pool", "length"))
