"""DUCT: merging backbones that each domain fine-tunes from the pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.last_layer import classifier, last_layer, pooled
from covon_avalanche.merging.transport import transport_plan


class CosineHead(nn.Module):
    """A cosine classifier for each domain: ``scale * cos(features, weight)``.

    The scale is learned and shared by all domains. Each domain's weights are a parameter of their
    own, so that no optimizer changes those of other domains.

    :param width: of the features.
    :param num_classes: classes of each domain.
    :param num_domains: number of domains.
    """

    def __init__(self, width: int, num_classes: int, num_domains: int) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(
            nn.Linear(width, num_classes, bias=False).weight for _ in range(num_domains)
        )
        self.scale = nn.Parameter(self.blocks[0].new_ones(()))

    def forward(self, features: Tensor, domain: int) -> Tensor:
        """Logits of shape (batch, classes) by a domain's weights."""
        directions = F.normalize(self.blocks[domain])
        return self.scale * F.linear(F.normalize(features), directions)


class DUCT(nn.Module):
    """A network for DUCT: a backbone that is merged after each domain, and a classifier per domain.

    Zhou et al., "Dual Consolidation for Pre-Trained Model-Based Domain-Incremental Learning" (CVPR
    2025), as in the authors' released experiments, which weigh all domains alike.

    Each domain fine-tunes the pretrained backbone ``θ0`` and its own classifier. Then the backbones
    are merged, ``θ = θ0 + Σ alpha (θ_t - θ0)`` over the domains so far (task arithmetic), and the
    domain's classifier is trained again on the features of the merged backbone. In training mode
    the logits are those of the current domain; in evaluation mode each class has its largest logit
    over the domains so far, so that no domain needs to be known.

    Without Avalanche, for each domain, call :meth:`begin_domain`, train, and then call
    :meth:`merge_backbone`, :meth:`retrain_classifier` and, optionally, :meth:`transport`.

    :param network: a pretrained network; its last layer is replaced, in place.
    :param num_classes: classes, shared by all domains.
    :param num_domains: how many domains there will be; no shape changes later.
    :param alpha: weight of each domain's change of the backbone.
    :param keep_means: keep class means of the pretrained features, for :meth:`transport`.
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
        keep_means: bool = False,
    ) -> None:
        super().__init__()
        check_whole("num_classes", num_classes)
        check_whole("num_domains", num_domains)
        check_positive("alpha", alpha)
        self.alpha, self.num_classes, self.num_domains = alpha, num_classes, num_domains
        weight = classifier(network).weight
        features = weight.shape[1]
        self.backbone = _without_last_layer(network)
        self.head = CosineHead(features, num_classes, num_domains).to(weight)
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.register_buffer("pretrained", _flat(_state(self.backbone)))
        self.register_buffer("change", torch.zeros_like(_flat(list(self.backbone.parameters()))))
        shape = num_domains, num_classes, features
        means = weight.new_full(shape, torch.nan, requires_grad=False) if keep_means else None
        self.register_buffer("class_means", means)
        self.in_domain = False
        """Whether a training loop has begun the current domain and not finished it."""
        self.domains: Tensor
        """Number of domains begun."""
        self.pretrained: Tensor
        """``θ0`` and, where there is batch norm, its statistics, one after another."""
        self.change: Tensor
        """``Σ alpha (θ_t - θ0)``."""
        self.class_means: Tensor | None
        """In the pretrained feature space, NaN for classes that a domain lacks."""

    def features(self, x: Tensor) -> Tensor:
        """Features of shape (batch, width)."""
        return pooled(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        features, known = self.features(x), max(1, int(self.domains))
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                return self.head(features.float(), known - 1)
            return torch.stack([self.head(features.float(), t) for t in range(known)]).amax(0)

    @torch.no_grad()
    def begin_domain(self) -> None:
        """Begin a domain with the pretrained backbone.

        :raises ValueError: after the last of ``num_domains``.
        """
        if int(self.domains) >= self.num_domains:
            raise ValueError(
                f"num_domains is {self.num_domains}, but domain {self.num_domains + 1} begins"
            )
        _fill(_state(self.backbone), self.pretrained)
        for domain, weight in enumerate(self.head.blocks):
            weight.requires_grad_(domain == int(self.domains))  # the others take no part
        self.domains += 1

    @torch.no_grad()
    def merge_backbone(self) -> None:
        """Replace the domain's backbone by the merged one. Statistics of batch norm stay those of
        the domain; see :func:`update_batch_norm`."""
        weights = list(self.backbone.parameters())
        pretrained = self.pretrained[: len(self.change)]
        self.change += self.alpha * (_flat(weights) - pretrained)
        _fill(weights, pretrained + self.change)

    def retrain_classifier(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        epochs: int = 5,
        lr: float = 0.03,
        mb_size: int = 128,
    ) -> None:
        """Train the current domain's classifier and the scale alone, with cross-entropy.

        SGD with momentum 0.9 and weight decay 5e-4; the order is that of torch's global generator.

        :param features: of the merged backbone, of shape (examples, width).
        :param labels: class ids of shape (examples,).
        :raises ValueError: without examples.
        """
        if len(labels) == 0:
            raise ValueError("a domain has no training examples")
        domain = int(self.domains) - 1
        parameters = [self.head.blocks[domain], self.head.scale]
        optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)
        with torch.enable_grad():
            for _ in range(epochs):
                for rows in torch.randperm(len(labels), device="cpu").split(mb_size):
                    optimizer.zero_grad()
                    logits = self.head(features[rows], domain)
                    F.cross_entropy(logits, labels[rows]).backward()
                    optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def keep_class_means(self, features: Tensor, labels: Tensor) -> None:
        """Store the domain's class means.

        :param features: of the pretrained backbone, of shape (examples, width).
        :param labels: class ids of shape (examples,).
        """
        if self.class_means is None:
            raise ValueError("the class means are not kept: pass keep_means=True")
        for label in labels.unique().tolist():
            mean = features[labels == label].double().mean(0)
            self.class_means[int(self.domains) - 1, label] = mean.to(self.class_means)

    @torch.no_grad()
    def transport(self, reg: float) -> None:
        """Move the classifiers ``W_o`` of earlier domains towards the current one's ``W``.

        To ``(1 - alpha) W_o + alpha C Sᵀ W``, where the plan ``S`` transports the current domain's
        class means to those of the earlier one, and ``C`` is the number of classes: in DUCT's
        released code, without ``C``, the second term is 1/C of a classifier's size. Classes that a
        domain lacks take no part.

        :param reg: entropic regularisation, in units of the distance.
        """
        if self.class_means is None:
            raise ValueError("transport needs class means: pass keep_means=True")
        current = int(self.domains) - 1
        known = ~self.class_means.isnan().any(2)  # of shape (domains, classes)
        new = known[current]
        for domain, weight in enumerate(self.head.blocks[:current]):
            old = known[domain]
            distances = torch.cdist(self.class_means[current, new], self.class_means[domain, old])
            plan = transport_plan(distances, reg)
            moved = int(old.sum()) * plan.T @ self.head.blocks[current][new]
            weight[old] = (1 - self.alpha) * weight[old] + self.alpha * moved


def _without_last_layer(network: nn.Module) -> nn.Module:
    parent, _, key = last_layer(network).rpartition(".")
    if not key:
        return nn.Identity()
    setattr(network.get_submodule(parent), key, nn.Identity())
    return network


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
