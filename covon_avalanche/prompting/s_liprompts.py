"""S-liPrompts: visual and textual prompts for each domain, on a frozen CLIP."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.prompting.domain_prompts import DomainPrompts
from covon_avalanche.prompting.selectors import NearestCentre


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
        text: Any = getattr(network, "text", None)
        if text is None:
            raise ValueError(
                f"{type(self).__name__} needs a CLIP with its text tower: create it with "
                "create_backbone(name, num_classes, class_names=...) and a backbone of open_clip, "
                f"got {type(network).__name__}"
            )
        check_whole("context", context)
        super().__init__(network, num_domains, prompts=prompts, centres=centres)
        self.contexts = nn.ParameterList(
            self.new_empty(context, text.width).normal_(std=0.02) for _ in range(num_domains)
        )
        del self.head

    def domain_logits(self, x: Tensor, domain: int) -> Tensor:
        text: Any = self.vit.network.text
        images = F.normalize(self.vit(x, self.prompts[domain]), dim=-1)
        classes = F.normalize(text(self.contexts[domain]), dim=-1)
        return text.scale * images @ classes.T


class DomainMixture(SLiPrompts):
    """Base of methods that mix the predictions with all learned domains' prompts.

    They need one forward pass per domain and image. The outputs are logarithms of the mixed class
    probabilities. See :class:`SLiPrompts` for the parameters.
    """

    @abstractmethod
    def log_weights(self, distances: Tensor, logits: Tensor) -> Tensor:
        """Logarithms of the domains' weights, of shape (batch, domains).

        :param distances: of each image to each domain's nearest centre, 1 - cosine, in the frozen
            network's features; of shape (batch, domains).
        :param logits: with each domain's prompts, of shape (batch, domains, classes).
        """

    def predicted_logits(self, x: Tensor) -> Tensor:
        if self.selector.learned == 0:
            return super().predicted_logits(x)
        distances = self.selector.cosine_distances(self.vit.query(x))
        domains = range(distances.shape[1])
        logits = torch.stack([self.domain_logits(x, domain) for domain in domains], 1).float()
        weights = self.log_weights(distances, logits)
        return (logits.log_softmax(-1) + weights[..., None]).logsumexp(1)


class SLiPromptsMixture(DomainMixture):
    """S-liPrompts whose class probabilities are averaged over domains by their distance.

    The weights are ``softmax(-distance / temperature)``, with the distance 1 - cosine to a domain's
    nearest centre. A simple relative of MoP-CLIP (Nicolas et al., "MoP-CLIP: A Mixture of
    Prompt-Tuned CLIP Models for Domain Incremental Learning", WACV 2024), which also decides by a
    threshold whether to mix.

    :param temperature: of the weights; small ones select the nearest domain.

    See :class:`SLiPrompts` for the other parameters.
    """

    def __init__(
        self, network: nn.Module, num_domains: int, *, temperature: float = 0.05, **options: int
    ) -> None:
        check_positive("temperature", temperature)
        super().__init__(network, num_domains, **options)
        self.temperature = temperature

    def log_weights(self, distances: Tensor, logits: Tensor) -> Tensor:
        return (-distances / self.temperature).log_softmax(1)
