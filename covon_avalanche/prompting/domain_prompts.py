"""Base of methods with parameters for each domain; a selector chooses the domain of an image."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_whole
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.selectors import DomainSelector, NearestCentre


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

    def take_heads(self) -> nn.ModuleList:
        """Replace the shared head by a copy for each domain, and return the copies."""
        heads = nn.ModuleList(copy.deepcopy(self.head) for _ in range(self.num_domains))
        del self.head
        return heads

    @abstractmethod
    def domain_logits(self, x: Tensor, domain: int) -> Tensor:
        """Logits with the parameters of a domain."""

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
        """Fit the selector to the features of the domain's images."""
        self.selector.fit(self.domain, torch.cat([self.vit.query(x) for x, *_ in batches()]))
