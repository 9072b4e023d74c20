"""S-iPrompts: prompts and a head for each domain, selected by the nearest K-means centre."""

from __future__ import annotations

from torch import Tensor, nn

from covon_avalanche.prompting.domain_prompts import DomainPrompts


class SPrompts(DomainPrompts):
    """S-iPrompts (Wang et al., "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor
    for Domain Incremental Learning", NeurIPS 2022).

    Each domain has its own prompts, behind the class token, and its own linear head. For a test
    image, those of the domain with the nearest K-means centre of frozen features are used. The
    centres are computed from images with the evaluation transform (the authors': with the training
    transform).

    See :class:`DomainPrompts` for the parameters.
    """

    def __init__(
        self, network: nn.Module, num_domains: int, *, prompts: int = 10, centres: int = 5
    ) -> None:
        super().__init__(network, num_domains, prompts=prompts, centres=centres)
        self.heads = self.take_heads()

    def domain_logits(self, x: Tensor, domain: int) -> Tensor:
        return self.heads[domain](self.vit(x, self.prompts[domain]))
