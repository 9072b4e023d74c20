"""Classifiers in closed form in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.closed_form import ClosedFormModel
from covon_avalanche.plugins.task_loader import check_whole_task, task_loader


class ClosedFormPlugin(SupervisedPlugin):
    """Computes the classifier of a :class:`ClosedFormModel` after each domain::

        features = FeatureExtractor(create_backbone("squeezenet", 7, weights="default"))
        width = features(x).shape[1]  # x: a batch of images
        model = ClosedFormModel(features, RidgeClassifier(width, 7))
        Naive(model=model, optimizer=SGD(model.parameters()), plugins=[ClosedFormPlugin()])

    Takes one pass over the domain's training data with the evaluation transform. Nothing is trained
    by gradient descent, except the weights that a model adapts in the first domain, for the
    strategy's number of epochs. Otherwise the plugin sets this number to 0, and the optimizer is
    not used. Does not use task identities.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Train for no epochs, unless the network is adapted.

        :raises ValueError: if the strategy's model is not a :class:`ClosedFormModel`, or for an
            online stream.
        """
        check_whole_task(strategy.experience)
        if not isinstance(strategy.model, ClosedFormModel):
            raise ValueError(
                "ClosedFormPlugin needs a ClosedFormModel, got "
                f"{type(strategy.model).__name__}: wrap the network with "
                "ClosedFormModel(FeatureExtractor(network), head)"
            )
        if not strategy.model.begin_domain():
            strategy.train_epochs = 0

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Add the domain."""
        strategy.model.learn(task_loader(strategy, strategy.eval_mb_size))
