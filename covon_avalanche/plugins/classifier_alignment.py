"""Classifier alignment in an Avalanche strategy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor, nn

from covon_avalanche.checks import check_whole
from covon_avalanche.last_layer import classifier
from covon_avalanche.merging.alignment import FeatureGaussians, Layer, align_layers, fit_gaussians
from covon_avalanche.plugins.merge import MergePlugin
from covon_avalanche.plugins.posterior import PosteriorPlugin, reads_merged_weights
from covon_avalanche.plugins.task_loader import check_one_head, check_whole_task, dataset_features


class ClassifierAlignmentPlugin(SupervisedPlugin):
    """Retrains a last layer that all domains share on Gaussians of their features::

        slow = [p for name, p in model.named_parameters() if not name.startswith("head.")]
        optimizer = SGD([{"params": model.head.parameters()}, {"params": slow, "lr": 1e-4}], 1e-2)
        Naive(model=model, optimizer=optimizer, plugins=[ClassifierAlignmentPlugin()])

    A variant of SLCA, see :class:`SLCAPlugin`, for one classifier instead of one for each domain.
    After each domain the features that the last layer receives (with the evaluation transform) are
    summarised by a mean for each class and one covariance for all classes of the domain. From the
    second domain on, the last layer alone is then retrained on samples of all Gaussians so far; see
    :func:`covon_avalanche.merging.align_classifier`. The retrained layer is for predictions only:
    the next domain starts from the layer as it was before.

    Works with any strategy and optimizer, on any network whose last layer is linear or a
    convolution with kernel size 1. Give it to the strategy after the plugins that read or merge the
    weights at the end of a domain. Does not use task identities. Between domains an optimizer's
    posterior has the retrained layer as its mean, with the precision of the trained one; the prior
    of the next domain does not.

    Memory: a copy of the last layer and, in each domain, width² numbers for the covariance and
    width for each class.
    """

    reads_merged_weights = True

    def __init__(self, *, samples: int = 256, epochs: int = 5) -> None:
        """
        :param samples: features drawn per class and domain in each epoch.
        :param epochs: of retraining.
        """
        super().__init__()
        check_whole("samples", samples)
        check_whole("epochs", epochs)
        self.samples, self.epochs = samples, epochs
        self.gaussians: list[FeatureGaussians] = []
        """By domain, on the CPU."""
        self.per_class = False
        self._trained: dict[str, Tensor] = {}  # the last layer before it was retrained
        self._retrained = False  # whether the retrained layer is in place

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Check that plugins that read or merge weights come before this one.

        :raises ValueError: naming one that does not.
        """
        for plugin in dropwhile(lambda plugin: plugin is not self, strategy.plugins):
            merges = isinstance(plugin, MergePlugin | PosteriorPlugin)
            if plugin is not self and (merges or reads_merged_weights(plugin)):
                raise ValueError(
                    f"{type(self).__name__} must come after {type(plugin).__name__}, because the "
                    "retrained classifier is for predictions only"
                )

    @torch.no_grad()
    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the last layer, before any plugin reads the weights that the domain starts from.
        Rows that the layer has grown since stay as they are."""
        if self._retrained:
            for name, p in self._head(strategy.model).named_parameters():
                p[: len(self._trained[name])] = self._trained[name].to(p)
            self._retrained = False  # a domain that was interrupted continues

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check that model and experience fit.

        :raises ValueError: if they do not.
        """
        check_whole_task(strategy.experience)
        check_one_head(self, strategy.model)
        classifier(strategy.model)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Summarise the domain, and retrain the last layer from the second domain on."""
        found = fit_gaussians(*self._features(strategy), per_class=self.per_class)
        gaussians = [*self.gaussians, found]
        if len(gaussians) > 1:
            self._keep_head(strategy.model)
            layers = self._layers(strategy.model)
            align_layers(layers, gaussians, samples=self.samples, epochs=self.epochs)
        self.gaussians = gaussians  # not of a domain that is interrupted here

    def _features(self, strategy: Any) -> tuple[Tensor, Tensor]:
        """Features of shape (examples, width), and labels."""
        return dataset_features(strategy.experience.dataset, strategy)

    def _head(self, model: Any) -> nn.Module:
        """The module that is retrained for predictions and restored for the next domain."""
        return classifier(model)

    def _layers(self, model: Any) -> Sequence[Layer]:
        """One classifier, or one for each domain so far."""
        return [classifier(model)]

    def _keep_head(self, model: Any) -> None:
        self._trained = {n: p.detach().clone() for n, p in self._head(model).named_parameters()}
        self._retrained = True
