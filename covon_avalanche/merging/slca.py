"""SLCA: a slow backbone, and a linear classifier for each domain."""

from __future__ import annotations

from torch import Tensor, nn

from covon_avalanche.last_layer import classifier
from covon_avalanche.merging.domain_heads import DomainHeads


class SLCA(DomainHeads):
    """A network for SLCA: one backbone for all domains, and a classifier for each.

    Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
    Pre-trained Model" (ICCV 2023), whose classes of a new task have weights of their own, also
    where they are the classes of earlier domains. :class:`covon_avalanche.plugins.SLCAPlugin`
    trains it. The classifiers are linear, with weights of standard deviation 0.02 at first.

    In training mode the logits are those of the current domain's classifier; in evaluation mode
    each class has its largest logit over the domains so far.

    :param network: a pretrained network; its last layer is replaced, in place.
    :param num_classes: classes, shared by all domains.
    :param num_domains: how many domains there will be; no shape changes later.
    :raises ValueError: naming the value and the rule, or if the last layer is not linear.
    """

    def __init__(self, network: nn.Module, num_classes: int, num_domains: int) -> None:
        weight = classifier(network).weight
        super().__init__(network, num_classes, num_domains)
        blocks = nn.ModuleList(nn.Linear(self.width, num_classes) for _ in range(num_domains))
        for name, p in blocks.named_parameters():
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.trunc_normal_(p, std=0.02)
        self.head.blocks = blocks.to(weight)

    def domain_logits(self, features: Tensor, domain: int) -> Tensor:
        logits: Tensor = self.head.blocks[domain](features)
        return logits
