"""Classifier alignment: retraining a classifier on Gaussians of the features of all domains.

Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model" (ICCV 2023); written from the paper's equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from covon_avalanche.last_layer import classifier

_RIDGE = 1e-4  # added to the diagonal of a covariance
_MB_SIZE = 256
_TEMPERATURE = 0.1


class FeatureGaussians(NamedTuple):
    """Gaussians of one domain's features: a mean for each class and one covariance for all."""

    classes: Tensor
    """Class ids, int64, of shape (classes,)."""
    means: Tensor
    """Of shape (classes, width)."""
    covariance: Tensor
    """Of shape (width, width), in units of the features squared."""


def fit_gaussians(features: Tensor, labels: Tensor) -> FeatureGaussians:
    """Class means and the pooled covariance within classes, plus 1e-4 on its diagonal.

    The covariance is the sum of squared deviations from the class means, divided by the number of
    examples minus that of classes. A class with one example adds nothing to it.

    :param features: of shape (examples, width).
    :param labels: class ids of shape (examples,).
    :raises ValueError: without examples.
    """
    if len(labels) == 0:
        raise ValueError("a domain has no training examples")
    classes, rows = labels.unique(return_inverse=True)
    x = features.detach().cpu().double()
    members = F.one_hot(rows.cpu(), len(classes)).double()
    means = members.T @ x / members.sum(0)[:, None]
    deviations = x - means[rows.cpu()]
    covariance = deviations.T @ deviations / max(1, len(labels) - len(classes))
    covariance.diagonal().add_(_RIDGE)
    return FeatureGaussians(classes.cpu(), means.float(), covariance.float())


def align_classifier(
    network: nn.Module,
    domains: Sequence[FeatureGaussians],
    *,
    samples: int = 256,
    epochs: int = 5,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
) -> None:
    """Retrain the last layer on features drawn from the Gaussians of all domains so far.

    The loss is the cross-entropy of ``z / (0.1 ‖z‖)`` with the layer's outputs ``z``. Before
    sampling, the means of domain t of T are multiplied by 0.9 + 0.1 t / T. SGD with mini-batches of
    256 and a cosine schedule over the epochs, each with new samples of torch's global generator.

    Features of a convolutional layer with kernel size 1 are averaged over positions, and a
    nonlinearity that follows it (SqueezeNet's ReLU) takes no part.

    :param network: its last layer must be linear or have kernel size 1; nothing else is changed.
    :param domains: in the order of training, see :func:`fit_gaussians`.
    :param samples: features per class and domain in each epoch.
    :raises ValueError: if the last layer is not linear, or frozen.
    """
    layer = classifier(network)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the last layer is frozen: it cannot be aligned")
    # By pair of class and domain:
    means = torch.cat([(0.9 + 0.1 * t / len(domains)) * d.means for t, d in enumerate(domains, 1)])
    labels = torch.cat([d.classes for d in domains])
    domain = torch.cat([torch.full_like(d.classes, t) for t, d in enumerate(domains)])
    roots = [_root(d.covariance) for d in domains]
    optimizer = torch.optim.SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, epochs)
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.randperm(len(labels) * samples, device="cpu") % len(labels)
            for chosen in order.split(_MB_SIZE):
                noise = torch.randn_like(x := means[chosen])
                for t in domain[chosen].unique().tolist():
                    rows = domain[chosen] == t
                    x[rows] += noise[rows] @ roots[t]
                z = F.linear(x.to(layer.weight), layer.weight.flatten(1), layer.bias)
                norm = z.norm(dim=1, keepdim=True) + 1e-7
                loss = F.cross_entropy(z / (_TEMPERATURE * norm), labels[chosen].to(z.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    optimizer.zero_grad()


def _root(covariance: Tensor) -> Tensor:
    """``R`` with ``Rᵀ R`` the covariance, which rounding may have left with eigenvalues below 0."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return (values.clamp(min=0).sqrt()[:, None] * vectors.T).float()
