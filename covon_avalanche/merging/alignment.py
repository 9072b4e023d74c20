"""Classifier alignment: retraining a classifier on Gaussians of the features of all domains.

Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model" (ICCV 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from covon_avalanche.checks import check_class_ids
from covon_avalanche.last_layer import classifier

Layer = nn.Linear | nn.Conv1d | nn.Conv2d

_RIDGE = 1e-4  # added to the diagonal of a covariance
_MB_SIZE = 256
_TEMPERATURE = 0.1


class FeatureGaussians(NamedTuple):
    """Gaussians of one domain's features: a mean for each class, and covariances."""

    classes: Tensor
    """Class ids, int64, of shape (classes,)."""
    means: Tensor
    """Means of shape (classes, width)."""
    covariance: Tensor
    """Covariance of all classes, of shape (width, width), or of each class, of shape (classes,
    width, width); in units of the features squared."""


def fit_gaussians(features: Tensor, labels: Tensor, *, per_class: bool = False) -> FeatureGaussians:
    """Class means and the pooled covariance within classes, plus 1e-4 on its diagonal.

    The covariance is the sum of squared deviations from the class means, divided by the number of
    examples minus that of classes. A class with one example adds nothing to it.

    :param features: of shape (examples, width).
    :param labels: class ids of shape (examples,).
    :param per_class: a covariance for each class, of its examples alone, as in SLCA.
    :raises ValueError: without examples, or for labels that are no class ids.
    :raises FloatingPointError: if features are not finite.
    """
    check_class_ids("labels", labels)
    if len(labels) == 0:
        raise ValueError("a domain has no training examples")
    if not features.isfinite().all():
        raise FloatingPointError("the features of the network are not finite")
    classes, rows = labels.unique(return_inverse=True)
    x = features.detach().cpu().double()
    members = F.one_hot(rows.cpu(), len(classes)).double()
    means = members.T @ x / members.sum(0)[:, None]
    deviations = x - means[rows.cpu()]
    parts = (
        [deviations[rows.cpu() == i] for i in range(len(classes))] if per_class else [deviations]
    )
    lost = 1 if per_class else len(classes)  # degrees of freedom
    found = torch.stack([part.T @ part / max(1, len(part) - lost) for part in parts])
    found.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    covariance = found if per_class else found[0]
    return FeatureGaussians(classes.cpu(), means.float(), covariance.float())


def align_classifier(
    network: nn.Module, domains: Sequence[FeatureGaussians], **options: Any
) -> None:
    """Retrain the last layer on features drawn from the Gaussians of all domains so far.

    Features of a convolutional layer with kernel size 1 are averaged over positions, and a
    nonlinearity that follows it (SqueezeNet's ReLU) takes no part.

    :param network: its last layer must be linear or have kernel size 1; nothing else is changed.
    :param domains: in the order of training; each is the result of ``fit_gaussians(features,
        labels)`` of ``covon_avalanche.merging.alignment`` for what the last layer receives.
    :param options: ``samples``, ``epochs``, ``lr`` and ``weight_decay``, see ``align_layers`` of
        the same module.
    :raises ValueError: if the last layer is not linear, or frozen.
    """
    align_layers([classifier(network)], domains, **options)


def align_layers(
    layers: Sequence[Layer],
    domains: Sequence[FeatureGaussians],
    *,
    samples: int = 256,
    epochs: int = 5,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
) -> None:
    """Retrain one classifier, or one for each domain, on features drawn from Gaussians.

    The loss is the cross-entropy of ``z / (0.1 ‖z‖)`` with the outputs ``z`` of all classifiers
    and the mean of their norms. Before sampling, the means of domain t of T are multiplied by
    0.9 + 0.1 t / T. SGD with momentum 0.9, mini-batches of 256 and a cosine schedule over the
    epochs, each with new samples of torch's global generator.

    :param layers: one for all domains, or one for each, whose outputs are then distinct classes.
    :param domains: in the order of training, see :func:`fit_gaussians`.
    :param samples: features drawn per class and domain in each epoch.
    :raises ValueError: if all layers are frozen.
    """
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the last layer is frozen: it cannot be aligned")
    # By pair of class and domain:
    means = torch.cat([(0.9 + 0.1 * t / len(domains)) * d.means for t, d in enumerate(domains, 1)])
    offset = len(layers[0].weight) if len(layers) > 1 else 0
    labels = torch.cat([d.classes + t * offset for t, d in enumerate(domains)])
    of_domains = [_root(d.covariance) for d in domains]  # one, or one for each class
    roots = torch.cat(of_domains)
    pairs = [len(d.means) // len(r) for d, r in zip(domains, of_domains, strict=True) for _ in r]
    index = [i for i, n in enumerate(pairs) for _ in range(n)]
    root_of = torch.tensor(index, dtype=torch.int64, device="cpu")
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, epochs)
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.randperm(len(labels) * samples, device="cpu") % len(labels)
            for chosen in order.split(_MB_SIZE):
                noise = torch.randn_like(x := means[chosen])
                for t in root_of[chosen].unique().tolist():
                    rows = root_of[chosen] == t
                    x[rows] += noise[rows] @ roots[t]
                loss = _normalised_loss(layers, x.to(layers[0].weight), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    optimizer.zero_grad()


def _normalised_loss(layers: Sequence[Layer], x: Tensor, labels: Tensor) -> Tensor:
    z = [
        layer(x)  # which may be a cosine classifier
        if isinstance(layer, nn.Linear)
        else F.linear(x, layer.weight.flatten(1), layer.bias)
        for layer in layers
    ]
    norm = torch.stack([part.norm(dim=1, keepdim=True) + 1e-7 for part in z]).mean(0)
    return F.cross_entropy(torch.cat(z, 1) / (_TEMPERATURE * norm), labels.to(x.device))


def _root(covariance: Tensor) -> Tensor:
    """``R`` with ``Rᵀ R`` the covariance, which rounding may have left with eigenvalues below 0; of
    shape (covariances, width, width)."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = values.clamp(min=0).sqrt()[..., None] * vectors.mT
    return root.float().reshape(-1, *covariance.shape[-2:])
