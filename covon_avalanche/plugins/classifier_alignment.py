"""Classifier alignment in an Avalanche strategy, and SLCA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from avalanche.models import MultiTaskModule
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.last_layer import classifier
from covon_avalanche.merging import SLCA, MergeRule
from covon_avalanche.merging.alignment import (
    FeatureGaussians,
    Layer,
    align_layers,
    fit_gaussians,
)
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.plugins.merge import merge_task
from covon_avalanche.plugins.task_loader import check_whole_task, dataset_features


class ClassifierAlignmentPlugin(SupervisedPlugin):
    """Retrains a last layer that all domains share on Gaussians of their features::

        slow = [p for name, p in model.named_parameters() if not name.startswith("head.")]
        optimizer = SGD([{"params": model.head.parameters()}, {"params": slow, "lr": 1e-4}], 1e-2)
        Naive(model=model, optimizer=optimizer, plugins=[ClassifierAlignmentPlugin()])

    A variant of SLCA, see :class:`SLCAPlugin`, for one classifier instead of one for each domain.
    After each domain the features that the last layer receives (with the evaluation transform) are
    summarised by a mean for each class and one covariance for all classes of the domain. From the
    second domain on, the last layer alone is then retrained on samples of all Gaussians so far; see
    :func:`covon_avalanche.merging.align_classifier`. It is for predictions: the next domain starts
    from the layer as it was before.

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
        self.per_class = False
        self._trained: dict[str, Tensor] = {}  # the last layer before it was retrained

    @torch.no_grad()
    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Put the last layer back, before any plugin reads the weights that the domain starts
        from. Rows that the layer has grown since stay as they are."""
        if self._trained:
            for name, p in self._head(strategy.model).named_parameters():
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
        found = fit_gaussians(*self._features(strategy), per_class=self.per_class)
        self.gaussians = [*self.gaussians, found]
        if len(self.gaussians) > 1:
            self._keep_head(strategy.model)
            align_layers(
                self._layers(strategy.model),
                self.gaussians,
                samples=self.samples,
                epochs=self.epochs,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )

    def _features(self, strategy: Any) -> tuple[Tensor, Tensor]:
        """Features of shape (examples, width), and labels, on the CPU."""
        features, labels = dataset_features(strategy.experience.dataset, strategy)
        return features.cpu(), labels.cpu()

    def _head(self, model: Any) -> nn.Module:
        """What is retrained, and put back."""
        return classifier(model)

    def _layers(self, model: Any) -> Sequence[Layer]:
        """One classifier, or one for each domain so far."""
        return [classifier(model)]

    def _keep_head(self, model: Any) -> None:
        self._trained = {n: p.detach().clone() for n, p in self._head(model).named_parameters()}


class SLCAPlugin(ClassifierAlignmentPlugin):
    """Trains a :class:`~covon_avalanche.merging.SLCA` network, and aligns its classifiers::

        model = SLCA(create_backbone("vit-b16-in1k", 65, weights="default"), 65, num_domains=4)
        groups = [{"params": model.head.parameters()},
                  {"params": model.backbone.parameters(), "lr": 1e-4}]
        optimizer = SGD(groups, lr=1e-2, momentum=0.9, weight_decay=5e-4)
        Naive(model=model, optimizer=optimizer, plugins=[SLCAPlugin()])

    Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
    Pre-trained Model" (ICCV 2023), as in the authors' code. Each domain trains the backbone, at a
    low learning rate, and a classifier of its own, with a new state of the optimizer. After each
    domain features (with the evaluation transform) are summarised by a mean and a covariance for
    each class; from the second domain on, the classifiers of all domains are retrained on samples
    of these Gaussians, see :func:`covon_avalanche.merging.alignment.align_layers`. That is for
    predictions: the next domain starts from the classifiers as they were before.

    With ``rule`` the weights are merged with those after the domain before: :class:`EMA` is CoMA,
    and :class:`CoFiMA` CoFiMA, of Marouf et al., "Weighted Ensemble Models Are Strong Continual
    Learners" (ECCV 2024). The weights before are those after alignment, the Gaussians are those of
    the merged backbone, and alignment starts from merged classifiers; the next domain starts from
    the merged backbone, but from unmerged classifiers. CoFiMA's Fisher information is that of the
    loss of the current classifier (the authors': of all classifiers together).

    Works with any optimizer without a posterior. A domain that was interrupted does not count.
    Task identities are not used.

    Memory: a copy of the classifiers, in each domain width² numbers for each class and, with
    ``rule``, a copy of the weights.
    """

    def __init__(
        self, rule: MergeRule | None = None, *, per_class: bool = True, **options: Any
    ) -> None:
        """
        :param rule: how to merge; ``None``: not at all.
        :param per_class: a covariance for each class; otherwise one for all classes of a domain.
            Those of all classes of DomainNet would take 4.9 GB with a ViT-B/16.
        :param options: see :class:`ClassifierAlignmentPlugin`.
        """
        super().__init__(**options)
        self.rule, self.per_class = rule, per_class
        self._before: dict[str, Tensor] = {}  # weights after the domain before, aligned

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Copy the aligned weights, and put the classifiers back."""
        if self.rule is not None:
            self._before = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        super().before_train_dataset_adaptation(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin a domain.

        :raises ValueError: if model and optimizer do not fit, or there are too many domains.
        """
        check_whole_task(strategy.experience)
        model = strategy.model
        if not isinstance(model, SLCA):
            raise ValueError(
                f"SLCAPlugin needs an SLCA model, got {type(model).__name__}: wrap the network "
                "with SLCA(network, num_classes, num_domains)"
            )
        if isinstance(strategy.optimizer, PosteriorOptimizer):
            raise ValueError(
                "SLCA trains without a prior: use an optimizer without a posterior, got "
                f"{type(strategy.optimizer).__name__}"
            )
        if model.in_domain:  # its training was interrupted
            model.domains -= 1
        model.begin_domain()
        model.in_domain = True
        strategy.optimizer.state.clear()

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Merge, if there is a rule, summarise the domain, and align the classifiers."""
        self._keep_head(strategy.model)
        for layer in self._layers(strategy.model):
            layer.requires_grad_(True)
        if self.rule is not None:
            merge_task(strategy, self.rule, self._before)
        trained = self._trained
        super().after_training_exp(strategy)
        self._trained, self._before = trained, {}
        strategy.model.in_domain = False

    def _features(self, strategy: Any) -> tuple[Tensor, Tensor]:
        data, model = strategy.experience.dataset, strategy.model
        features, labels = dataset_features(data, strategy, model.features)
        return features.cpu(), labels.cpu()

    def _head(self, model: Any) -> nn.Module:
        head: nn.Module = model.head
        return head

    def _layers(self, model: Any) -> Sequence[Layer]:
        return list(model.head.blocks[: int(model.domains)])
