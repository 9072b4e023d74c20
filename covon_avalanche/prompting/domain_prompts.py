"""Base of methods with parameters for each domain; a selector chooses the domain of an image."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_whole
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.selectors import DomainSelector, NearestCentre, cosines


class DomainPrompts(PromptModel):
    """Base of methods with prompts for each domain, behind the class token.

    For a test image, the parameters of the domain that a selector chooses by the features of the
    frozen network are used; images are grouped by domain, so that each needs one forward pass
    beside that of its features. The default ``selector`` is :class:`NearestCentre`.

    :param prompts: tokens per domain.
    :param centres: K-means centres per domain.

    See :class:`PromptModel` for the other parameters.
    """

    selector: DomainSelector

    def __init__(
        self, network: nn.Module, num_domains: int, *, prompts: int = 10, centres: int = 5
    ) -> None:
        super().__init__(network, num_domains)
        check_whole("prompts", prompts)
        bound = 1 / math.sqrt(self.vit.width)
        self.prompts = nn.ParameterList(
            self.new_empty(prompts, self.vit.width).uniform_(-bound, bound)
            for _ in range(num_domains)
        )
        self.selector = NearestCentre(self.vit.feature_width, num_domains, centres)
        self.selector.to(self.prompts[0])

    @classmethod
    def new_contexts(cls, network: nn.Module, length: int, n: int) -> nn.ParameterList:
        """Token embeddings before class names, normal with standard deviation 0.02.

        :param length: tokens of a context.
        :param n: number of contexts.
        :raises ValueError: for a network without text tower.
        """
        text: Any = getattr(network, "text", None)
        if text is None:
            raise ValueError(
                f"{cls.__name__} needs a CLIP with its text tower: create it with "
                "create_backbone(name, num_classes, class_names=...) and a backbone of open_clip, "
                f"got {type(network).__name__}"
            )
        check_whole("context", length)
        like = next(network.parameters())
        shape = length, text.width
        return nn.ParameterList(
            like.new_empty(shape, dtype=torch.float32).normal_(std=0.02) for _ in range(n)
        )

    def text_logits(self, features: Tensor, context: Tensor) -> Tensor:
        """Scaled cosines of image features and the names of the classes behind a context."""
        text: Any = self.vit.network.text
        logits: Tensor = text.scale * cosines(features, text(context))
        return logits

    def image_features(self, x: Tensor, domain: int) -> Tensor:
        """Features of shape (batch, width), with the prompts of a domain."""
        return self.vit(x, self.prompts[domain])

    @abstractmethod
    def classify(self, features: Tensor, domain: int) -> Tensor:
        """Logits of features, by a domain's classifier."""

    def domain_logits(self, x: Tensor, domain: int) -> Tensor:
        """Logits with the parameters of a domain."""
        return self.classify(self.image_features(x, domain), domain)

    def training_logits(self, x: Tensor) -> Tensor:
        return self.domain_logits(x, self.domain)

    def predicted_logits(self, x: Tensor) -> Tensor:
        domains = self.selector(self.vit.query(x))
        order, logits = [], []
        for domain in domains.unique().tolist():
            order.append((domains == domain).nonzero()[:, 0])
            logits.append(self.domain_logits(x[order[-1]], domain))
        return torch.cat(logits)[torch.cat(order).argsort()]

    @torch.no_grad()
    def end_domain(self, batches: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
        """Fit the selector to the features of the domain's images.

        :raises ValueError: without images.
        """
        found = [self.vit.query(x) for x, *_ in batches()]
        if not found:
            raise ValueError("a domain has no training examples")
        self.selector.fit(self.domain, torch.cat(found))
