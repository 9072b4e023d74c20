"""SOYO: prompts, adapters and a head for each domain, and a trained selector."""

from __future__ import annotations

from torch import Tensor, nn

from covon_avalanche.prompting.pina import AdapterInit, LinearAdapter
from covon_avalanche.prompting.s_prompts import SPrompts
from covon_avalanche.prompting.selectors import MixtureSelector


class SOYO(SPrompts):
    """SOYO (Wang et al., "Boosting Domain Incremental Learning: Selecting the Optimal Parameters is
    All You Need", CVPR 2025), as in the authors' code.

    Each domain has its own prompts, adapters behind each block, and linear head or, with
    ``context``, its own context before class names. The domain of a test image is chosen by
    :class:`MixtureSelector`.

    See :class:`PINA` for ``bottleneck``, ``adapter_init`` and ``context``, and
    :class:`DomainPrompts` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        prompts: int = 10,
        bottleneck: int = 16,
        adapter_init: AdapterInit = "xavier",
        context: int | None = None,
    ) -> None:
        super().__init__(network, num_domains, prompts=prompts, context=context)
        self.selector = MixtureSelector(self.vit.feature_width, num_domains)
        self.adapters = nn.ModuleList(
            nn.ModuleList(
                LinearAdapter(self.vit.width, bottleneck, adapter_init)
                for _ in range(self.vit.depth)
            )
            for _ in range(num_domains)
        )
        for added in (self.selector, self.adapters):
            added.to(self.prompts[0])

    def image_features(self, x: Tensor, domain: int) -> Tensor:
        return self.vit(x, self.prompts[domain], adapters=self.adapters[domain])
