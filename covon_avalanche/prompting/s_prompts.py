"""S-iPrompts: prompts and a head for each domain, selected by the nearest K-means centre."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from covon_avalanche.prompting.domain_prompts import DomainPrompts


class SPrompts(DomainPrompts):
    """S-iPrompts (Wang et al., "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor
    for Domain Incremental Learning", NeurIPS 2022).

    Each domain has its own prompts, behind the class token, and its own linear head. For a test
    image, those of the domain with the nearest K-means centre of frozen features are used. The
    centres are computed from images with the evaluation transform (the authors': with the training
    transform).

    :param context: see :class:`SLiPrompts`; ``None``: linear heads.

    See :class:`DomainPrompts` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        prompts: int = 10,
        centres: int = 5,
        context: int | None = None,
    ) -> None:
        contexts = None if context is None else self.new_contexts(network, context, num_domains)
        super().__init__(network, num_domains, prompts=prompts, centres=centres)
        self.contexts = contexts
        if contexts is None:
            self.heads = nn.ModuleList(copy.deepcopy(self.head) for _ in range(num_domains))
        del self.head

    def classify(self, features: Tensor, domain: int) -> Tensor:
        if self.contexts is None:
            return self.heads[domain](features)
        return self.text_logits(features, self.contexts[domain])
