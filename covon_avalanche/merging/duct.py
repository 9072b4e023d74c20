"""DUCT: merging backbones that each domain fine-tunes from the pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.last_layer import classifier
from covon_avalanche.merging.domain_heads import DomainHeads
from covon_avalanche.merging.rule import Batches
from covon_avalanche.posterior.fisher import checked, in_mode


class DUCT(DomainHeads):
    """A network for DUCT: a backbone that is merged after each domain, and a classifier per domain.

    Zhou et al., "Dual Consolidation for Pre-Trained Model-Based Domain-Incremental Learning" (CVPR
    2025), as in the authors' released experiments, which give all domains the same weight.

    Each domain fine-tunes the pretrained backbone ``θ0`` and its own classifier, ``scale *
    cos(features, weight)``, with a scale that all domains share and that begins at 1. Then the
    backbones are merged, ``θ = θ0 + Σ alpha (θ_t - θ0)`` over the domains so far (task arithmetic),
    and the domain's classifier is trained again on the merged backbone.

    Without Avalanche, for each domain, call :meth:`begin_domain`, train, and then call
    :meth:`merge_backbone` and :meth:`retrain_classifier`.

    :param network: a pretrained network; its last layer is replaced, in place.
    :param num_classes: classes, shared by all domains.
    :param num_domains: how many domains there will be; no shape changes later.
    :param alpha: weight of each domain's change of the backbone.
    :raises ValueError: naming the value and the rule, or if the last layer is not linear.

    Memory: two copies of the backbone (``pretrained`` and ``change``).
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        num_domains: int,
        *,
        alpha: float = 0.25,
    ) -> None:
        check_positive("alpha", alpha)
        weight = classifier(network).weight
        super().__init__(network, num_classes, num_domains)
        self.alpha = alpha
        self.head.blocks = nn.ParameterList(  # so that no optimizer changes those of other domains
            nn.Linear(self.width, num_classes, bias=False).weight for _ in range(num_domains)
        )
        self.head.scale = nn.Parameter(self.head.blocks[0].new_ones(()))
        self.head.to(weight)
        self.register_buffer("pretrained", _flat(_state(self.backbone)))
        self.register_buffer("change", torch.zeros_like(_flat(list(self.backbone.parameters()))))
        self.pretrained: Tensor
        """``θ0`` and, where there is batch norm, its statistics, one after another."""
        self.change: Tensor
        """``Σ alpha (θ_t - θ0)``."""

    def domain_logits(self, features: Tensor, domain: int) -> Tensor:
        directions = F.normalize(self.head.blocks[domain])
        logits: Tensor = self.head.scale * F.linear(F.normalize(features), directions)
        return logits

    @torch.no_grad()
    def begin_domain(self) -> None:
        """Begin a domain with the pretrained backbone and a scale of 1.

        :raises ValueError: after the last of ``num_domains``.
        """
        super().begin_domain()
        _fill(_state(self.backbone), self.pretrained)
        self.head.scale.fill_(1)

    @torch.no_grad()
    def merge_backbone(self) -> None:
        """Replace the domain's backbone by the merged one. Statistics of batch norm stay those of
        the domain; see :func:`update_batch_norm`."""
        weights = list(self.backbone.parameters())
        pretrained = self.pretrained[: len(self.change)]
        self.change += self.alpha * (_flat(weights) - pretrained)
        _fill(weights, pretrained + self.change)

    def retrain_classifier(self, batches: Batches, *, epochs: int = 5, lr: float = 0.1) -> None:
        """Train the current domain's classifier and the scale alone, with cross-entropy.

        SGD at a constant learning rate, momentum 0.9 and weight decay 5e-4. The backbone is in
        evaluation mode.

        :param batches: starts an epoch: a pass over the domain's shuffled training data.
        :raises ValueError: for an epoch without a batch.
        """
        domain = int(self.domains) - 1
        parameters = [self.head.blocks[domain], self.head.scale]
        optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)
        with in_mode(self, train=False):
            for x, y, *_ in (batch for _ in range(epochs) for batch in checked(batches())):
                with torch.no_grad():
                    features = self.features(x)
                with torch.autocast(x.device.type, enabled=False):
                    loss = F.cross_entropy(self.domain_logits(features, domain), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()


def _state(backbone: nn.Module) -> list[Tensor]:
    """Parameters, and running statistics of batch norm."""
    buffers = [b for b in backbone.buffers() if b.is_floating_point()]
    return [*backbone.parameters(), *buffers]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    parts = [t.detach().flatten() for t in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")


def _fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    start = 0
    for t in tensors:
        t.copy_(values[start : start + t.numel()].view(t.shape))
        start += t.numel()
