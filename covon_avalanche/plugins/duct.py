"""DUCT in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.merging import DUCT, update_batch_norm
from covon_avalanche.plugins.task_loader import begin_domain, task_autocast, task_loader


class DUCTPlugin(SupervisedPlugin):
    """Fine-tunes, merges and retrains a :class:`~covon_avalanche.merging.DUCT` network::

        model = DUCT(create_backbone("vit-b16-in1k", 65, weights="default"), 65, num_domains=4)
        groups = [{"params": model.head.parameters()},
                  {"params": model.backbone.parameters(), "lr": 1e-3}]
        optimizer = SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
        Naive(model=model, optimizer=optimizer, plugins=[DUCTPlugin()])

    Each domain starts with the pretrained backbone and a new optimizer state. After it the backbone
    is merged, statistics of batch norm are re-estimated, and the domain's classifier is retrained
    on the merged backbone, with the training transform.

    Works with any optimizer without a posterior. Evaluations inside ``train`` (``eval_every``) use
    the domain's own backbone instead of the merged one. A domain that was interrupted does not
    count: the next one takes its place. Task identities are not used.
    """

    def __init__(self, *, retrain_epochs: int = 5, retrain_lr: float = 0.1) -> None:
        """
        :param retrain_epochs: of the classifier on the merged backbone.
        :param retrain_lr: of SGD in these epochs, constant.
        """
        super().__init__()
        check_whole("retrain_epochs", retrain_epochs, least=0)
        check_positive("retrain_lr", retrain_lr)
        self.retrain_epochs, self.retrain_lr = retrain_epochs, retrain_lr

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin a domain.

        :raises ValueError: if model and optimizer do not fit, or there are too many domains.
        """
        begin_domain(
            strategy,
            DUCT,
            needs="DUCTPlugin needs a DUCT model",
            hint="wrap the network with DUCT(network, num_classes, num_domains)",
            no_prior="DUCT trains each domain from the pretrained weights, without a prior",
        )

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Merge the backbone and retrain the classifier."""
        model: DUCT = strategy.model
        change = model.change.clone()
        try:
            model.merge_backbone()
            update_batch_norm(model, task_loader(strategy, strategy.train_mb_size, shuffled=True))
            with task_autocast(strategy):
                model.retrain_classifier(
                    lambda: task_loader(strategy, strategy.train_mb_size, augmented=True),
                    epochs=self.retrain_epochs,
                    lr=self.retrain_lr,
                )
        except BaseException:  # the domain begins anew
            model.change.copy_(change)
            raise
        model.in_domain = False
