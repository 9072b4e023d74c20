"""Classifiers in closed form in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.checks import check_whole
from covon_avalanche.closed_form import ClosedFormModel
from covon_avalanche.plugins.task_loader import check_whole_task, task_loader


class ClosedFormPlugin(SupervisedPlugin):
    """Computes the classifier of a :class:`ClosedFormModel` after each domain.

    Takes one pass over the domain's training data with the evaluation transform. Nothing is
    trained by gradients, except what the model adapts in the first domain: otherwise the plugin
    sets the strategy's number of epochs to 0, and its optimizer is not used. Does not use task
    identities.
    """

    def __init__(
        self, *, adapted_epochs: int | None = None, adapted_mb_size: int | None = None
    ) -> None:
        """
        :param adapted_epochs: of the first domain, where the model adapts the network; ``None``:
            the strategy's. RanPAC has 20.
        :param adapted_mb_size: training examples per batch in these epochs; ``None``: the
            strategy's. RanPAC has 48.
        """
        super().__init__()
        for name, value in (("epochs", adapted_epochs), ("mb_size", adapted_mb_size)):
            if value is not None:
                check_whole(f"adapted_{name}", value)
        self.adapted_epochs, self.adapted_mb_size = adapted_epochs, adapted_mb_size

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Set epochs and batch size of the adaptation, before batches are made."""
        if isinstance(strategy.model, ClosedFormModel) and int(strategy.model.domains) == 0:
            strategy.train_epochs = self.adapted_epochs or strategy.train_epochs
            strategy.train_mb_size = self.adapted_mb_size or strategy.train_mb_size

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
