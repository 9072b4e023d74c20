"""S-liPrompts: visual and textual prompts for each domain, on a frozen CLIP."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.prompting.domain_prompts import DomainPrompts
from covon_avalanche.prompting.selectors import NearestCentre
from covon_avalanche.prompting.text_classifier import new_contexts, text_logits


class SLiPrompts(DomainPrompts):
    """S-liPrompts (Wang et al., "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor
    for Domain Incremental Learning", NeurIPS 2022).

    Each domain has its own prompts of the image tower, and its own context before the class names,
    shared by all classes. The logits are scaled cosines of image and class embeddings. Domains are
    selected as by :class:`SPrompts`::

        network = create_backbone("clip-b16", 2, weights="default", class_names=["real", "fake"])
        model = SLiPrompts(network, num_domains=5)

    :param network: a CLIP with its text tower, as above; both stay frozen.
    :param context: tokens per domain before class names.
    :raises ValueError: for a network without text tower.

    See :class:`DomainPrompts` for the other parameters.
    """

    selector: NearestCentre

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        prompts: int = 10,
        context: int = 16,
        centres: int = 5,
    ) -> None:
        contexts = new_contexts(self, network, context, num_domains)
        super().__init__(network, num_domains, prompts=prompts, centres=centres)
        del self.head
        self.contexts = contexts

    def domain_logits(self, x: Tensor, domain: int) -> Tensor:
        features = self.image_features(x, domain)
        return text_logits(self.vit.network, features, self.contexts[domain])

    def image_features(self, x: Tensor, domain: int) -> Tensor:
        """Features of shape (batch, width), with the visual prompts of a domain."""
        return self.vit(x, self.prompts[domain])


class DomainMixture(SLiPrompts):
    """Base of methods that mix the predictions with all learned domains' prompts.

    They need one forward pass per domain and image. See :class:`SLiPrompts` for the parameters.
    """

    @abstractmethod
    def domain_distances(self, features: Tensor) -> Tensor:
        """Distances of the frozen network's features to each learned domain's nearest centre, of
        shape (batch, domains)."""

    @abstractmethod
    def mixed(self, logits: Tensor, distances: Tensor) -> Tensor:
        """Outputs of shape (batch, classes).

        :param logits: with each domain's prompts, of shape (batch, domains, classes).
        :param distances: to each domain's nearest centre, of shape (batch, domains).
        """

    def predicted_logits(self, x: Tensor) -> Tensor:
        if self.selector.learned == 0:
            return super().predicted_logits(x)
        distances = self.domain_distances(self.vit.query(x))
        domains = range(distances.shape[1])
        logits = torch.stack([self.domain_logits(x, domain) for domain in domains], 1).float()
        return self.mixed(logits, distances)


class SLiPromptsMixture(DomainMixture):
    """S-liPrompts whose class probabilities are averaged over domains by their distance.

    The weights are ``softmax(-distance / temperature)``, with the distance 1 - cosine to a domain's
    nearest centre; the outputs are logarithms of the averaged probabilities. A simple relative of
    MoP-CLIP (Nicolas et al., "MoP-CLIP: A Mixture of Prompt-Tuned CLIP Models for Domain
    Incremental Learning", WACV 2024), which also decides by a threshold whether to mix.

    :param temperature: of the weights; small ones select the nearest domain.

    See :class:`SLiPrompts` for the other parameters.
    """

    def __init__(
        self, network: nn.Module, num_domains: int, *, temperature: float = 0.05, **options: int
    ) -> None:
        check_positive("temperature", temperature)
        super().__init__(network, num_domains, **options)
        self.temperature = temperature

    def domain_distances(self, features: Tensor) -> Tensor:
        return self.selector.cosine_distances(features)

    def mixed(self, logits: Tensor, distances: Tensor) -> Tensor:
        weights = (-distances / self.temperature).log_softmax(1)
        return (logits.log_softmax(-1) + weights[..., None]).logsumexp(1)
