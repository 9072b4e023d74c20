"""Classifier alignment in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.models import MultiTaskModule
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.last_layer import classifier
from covon_avalanche.merging.alignment import FeatureGaussians, align_classifier, fit_gaussians
from covon_avalanche.plugins.task_loader import check_whole_task, dataset_features


class ClassifierAlignmentPlugin(SupervisedPlugin):
    """Retrains the last layer on Gaussians of the features of all domains, as SLCA does::

        slow = [p for name, p in model.named_parameters() if not name.startswith("head.")]
        optimizer = SGD([{"params": model.head.parameters()}, {"params": slow, "lr": 1e-4}], 1e-2)
        Naive(model=model, optimizer=optimizer, plugins=[ClassifierAlignmentPlugin()])

    Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
    Pre-trained Model" (ICCV 2023). After each domain the features that the last layer receives
    (with the evaluation transform) are summarised by a mean for each class and, unlike in SLCA, one
    covariance for all classes of the domain: one for each class of DomainNet would need 4.9 GB with
    a ViT-B/16. From the second domain on, the last layer alone is then retrained on samples of
    all Gaussians so far; see :func:`covon_avalanche.merging.align_classifier`. It is for
    predictions: the next domain starts from the layer as it was before.

    Works with any strategy and optimizer, on any network whose last layer is linear or a
    convolution with kernel size 1. Give it to the strategy after the plugins that read or merge the
    weights at the end of a domain. Does not use task identities. Between domains an optimizer's
    posterior has the retrained layer as its mean, with the precision of the trained one; the prior
    of the next domain does not.

    Memory: a copy of the last layer and, in each domain, width² numbers for the covariance and
    width for each class.
    """

    def __init__(
        self,
        *,
        samples: int = 256,
        epochs: int = 5,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        """
        :param samples: features drawn per class and domain in each epoch.
        :param epochs: of retraining.
        :param lr: of SGD in the first epoch of retraining; falls along a cosine.
        :param momentum: of SGD.
        :param weight_decay: of SGD.
        """
        super().__init__()
        check_whole("samples", samples)
        check_whole("epochs", epochs)
        check_positive("lr", lr)
        check_positive("momentum", momentum, zero=True)
        check_positive("weight_decay", weight_decay, zero=True)
        self.samples, self.epochs = samples, epochs
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.gaussians: list[FeatureGaussians] = []
        """By domain, on the CPU."""
        self._trained: dict[str, Tensor] = {}  # the last layer before it was retrained

    @torch.no_grad()
    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Put the last layer back, before any plugin reads the weights that the domain starts
        from. Rows that the layer has grown since stay as they are."""
        if self._trained:
            for name, p in classifier(strategy.model).named_parameters():
                p[: len(self._trained[name])] = self._trained[name].to(p)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check that model and experience fit.

        :raises ValueError: if they do not.
        """
        check_whole_task(strategy.experience)
        if isinstance(strategy.model, MultiTaskModule):
            raise ValueError("ClassifierAlignmentPlugin needs one head for all tasks")
        classifier(strategy.model)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Summarise the domain, and retrain the last layer from the second domain on."""
        features, labels = dataset_features(strategy.experience.dataset, strategy)
        self.gaussians = [*self.gaussians, fit_gaussians(features.cpu(), labels.cpu())]
        if len(self.gaussians) > 1:
            layer = classifier(strategy.model)
            self._trained = {name: p.detach().clone() for name, p in layer.named_parameters()}
            align_classifier(
                strategy.model,
                self.gaussians,
                samples=self.samples,
                epochs=self.epochs,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
