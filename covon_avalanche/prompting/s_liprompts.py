"""S-liPrompts: visual and textual prompts for each domain, on a frozen CLIP."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.prompting.s_prompts import SPrompts
from covon_avalanche.prompting.selectors import NearestCentre


class SLiPrompts(SPrompts):
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

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        prompts: int = 10,
        context: int = 16,
        centres: int = 5,
    ) -> None:
        super().__init__(network, num_domains, prompts=prompts, centres=centres, context=context)


class DomainMixture(SLiPrompts):
    """Base of methods that mix the predictions with all learned domains' prompts.

    They need one forward pass per domain and image. See :class:`SLiPrompts` for the parameters.
    """

    selector: NearestCentre
    contexts: nn.ParameterList

    @abstractmethod
    def mixed(self, logits: Tensor, features: Tensor) -> Tensor:
        """Outputs of shape (batch, classes).

        :param logits: with each learned domain's prompts, of shape (batch, domains, classes).
        :param features: of the frozen network, of shape (batch, width).
        """

    def predicted_logits(self, x: Tensor) -> Tensor:
        domains = range(self.selector.learned)
        if not domains:
            return super().predicted_logits(x)
        logits = torch.stack([self.domain_logits(x, domain) for domain in domains], 1).float()
        return self.mixed(logits, self.vit.query(x))


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

    def mixed(self, logits: Tensor, features: Tensor) -> Tensor:
        distances = self.selector.cosine_distances(features)
        weights = (-distances / self.temperature).log_softmax(1)
        return (logits.log_softmax(-1) + weights[..., None]).logsumexp(1)
