"""SLCA, CoMA and CoFiMA in an Avalanche strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from covon_avalanche.merging import SLCA, MergeRule
from covon_avalanche.merging.alignment import Layer
from covon_avalanche.plugins.classifier_alignment import ClassifierAlignmentPlugin
from covon_avalanche.plugins.merge import merge_task
from covon_avalanche.plugins.task_loader import begin_domain, dataset_features


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
    of these Gaussians, see :func:`covon_avalanche.merging.alignment.align_layers`. The retrained
    classifiers are for predictions only: the next domain starts from the classifiers as they were
    before.

    With ``rule`` the weights are merged with those after the domain before: :class:`EMA` is CoMA,
    and :class:`CoFiMA` CoFiMA, of Marouf et al., "Weighted Ensemble Models Are Strong Continual
    Learners" (ECCV 2024). The weights before are those after alignment, the Gaussians are those of
    the merged backbone, and alignment starts from merged classifiers; the next domain starts from
    the merged backbone, but from unmerged classifiers. CoFiMA's Fisher information is that of the
    loss of the current classifier (in the authors' code, of all classifiers together).

    Works with any optimizer without a posterior. A domain that was interrupted does not count.
    Task identities are not used.

    Memory: a copy of the classifiers, in each domain width² numbers for each class and, with
    ``rule``, a copy of the weights.
    """

    def __init__(
        self, rule: MergeRule | None = None, *, per_class: bool = True, **options: int
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
        """Copy the aligned weights, and restore the classifiers."""
        if self.rule is not None and not self._before:  # kept if the domain was interrupted
            self._before = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        super().before_train_dataset_adaptation(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin a domain.

        :raises ValueError: if model and optimizer do not fit, or there are too many domains.
        """
        begin_domain(
            strategy,
            SLCA,
            needs="SLCAPlugin needs an SLCA model",
            hint="wrap the network with SLCA(network, num_classes, num_domains)",
            no_prior="SLCA trains without a prior",
        )

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
        return dataset_features(strategy.experience.dataset, strategy, strategy.model.features)

    def _head(self, model: Any) -> nn.Module:
        head: nn.Module = model.head
        return head

    def _layers(self, model: Any) -> Sequence[Layer]:
        return list(model.head.blocks[: int(model.domains)])
