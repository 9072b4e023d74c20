"""A network with a classifier for each domain: the base of DUCT and SLCA."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_whole
from covon_avalanche.last_layer import classifier, last_layer, pooled


class DomainHeads(nn.Module):
    """A backbone with a classifier for each domain, all of the same classes.

    In training mode the logits are those of the current domain's classifier; in evaluation mode
    each class has its largest logit over the domains so far, so that no domain needs to be known.

    :param network: its last layer is replaced, in place.
    :param num_classes: classes, shared by all domains.
    :param num_domains: how many domains there will be; no shape changes later.
    :raises ValueError: naming the value and the rule, or if the last layer is not linear.
    """

    head: Any
    """``blocks`` has the classifier of each domain."""
    domains: Tensor
    """Number of domains begun."""

    def __init__(self, network: nn.Module, num_classes: int, num_domains: int) -> None:
        super().__init__()
        check_whole("num_classes", num_classes)
        check_whole("num_domains", num_domains)
        self.num_classes, self.num_domains = num_classes, num_domains
        weight = classifier(network).weight
        self.width: int = weight.shape[1]
        """Width of the features."""
        self.backbone = _without_last_layer(network)
        self.head = nn.Module()
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.in_domain = False
        """Whether a training loop has begun the current domain and not finished it."""

    def features(self, x: Tensor) -> Tensor:
        """Features of shape (batch, width), of the classifiers' type under autocast, too."""
        return pooled(self.backbone(x)).to(next(self.head.parameters()).dtype)

    @abstractmethod
    def domain_logits(self, features: Tensor, domain: int) -> Tensor:
        """Logits of shape (batch, classes) by a domain's classifier."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes).

        :raises ValueError: in training before the first domain has begun.
        """
        if self.training and not int(self.domains):
            raise ValueError(f"call begin_domain() before training this {type(self).__name__}")
        features, known = self.features(x), max(1, int(self.domains))
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                return self.domain_logits(features, known - 1)
            logits = [self.domain_logits(features, t) for t in range(known)]
            return torch.stack(logits).amax(0)

    def begin_domain(self) -> None:
        """Begin a domain, whose classifier alone is trained.

        :raises ValueError: after the last of ``num_domains``.
        """
        if int(self.domains) >= self.num_domains:
            raise ValueError(
                f"num_domains is {self.num_domains}, but domain {self.num_domains + 1} begins"
            )
        for domain, block in enumerate(self.head.blocks):
            block.requires_grad_(domain == int(self.domains))  # the others take no part
        self.domains += 1


def _without_last_layer(network: nn.Module) -> nn.Module:
    parent, _, key = last_layer(network).rpartition(".")
    if not key:
        return nn.Identity()
    setattr(network.get_submodule(parent), key, nn.Identity())
    return network
