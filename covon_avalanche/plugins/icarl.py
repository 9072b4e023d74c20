"""iCaRL in an Avalanche strategy, for streams whose classes recur."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.benchmarks.utils.utils import concat_datasets
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor, nn

from covon_avalanche.checks import check_class_ids, check_logits, check_whole
from covon_avalanche.last_layer import penultimate_features
from covon_avalanche.plugins.task_loader import check_one_head, check_whole_task, dataset_features

_FARTHEST = 4.0  # largest squared distance between points of the unit sphere


class ICaRLPlugin(SupervisedPlugin):
    """iCaRL for domain-incremental streams.

    Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning" (2017): exemplars
    are chosen by herding and added to the data of the next task; each output is a sigmoid that
    learns the labels and the network's outputs before the task (distillation); predictions
    are by the nearest mean of exemplars. **This method uses replay.**

    Avalanche's ``ICaRL`` has a loss that, in its own words, "doesn't work if classes observed in
    previous experiences might be observed again". Here they may. The paper replaces the labels of
    old classes by the outputs before the task: where all classes are old, nothing would be learned
    from labels, so here both are targets of all outputs. The memory is shared equally by the
    classes of each task. As in the authors' code, a mean is over exemplars and, for images, their
    mirror images; each class has a mean for each task, because its features differ by domain, and
    the nearest one is used.

    After the first task the output in ``strategy.eval`` is, for each class, minus the squared
    distance between its nearest mean and the features (the last layer's input, normalised), and -4,
    the largest possible distance, for classes not seen yet. Losses and calibration in evaluations
    are therefore computed from distances instead of logits; evaluations inside ``train`` use the
    means of the last finished task. In training the output is that of the network.

    In training the strategy's criterion is not used: give the plugin to the strategy after a
    :class:`CoVONPlugin` or :class:`VCLPlugin`, and before plugins that add to the loss (so it
    does not work with TD-VCL).
    """

    reads_merged_weights = True

    def __init__(self, mem_size: int) -> None:
        """
        :param mem_size: total number of exemplars, but at least one per class and task.
        """
        super().__init__()
        check_whole("mem_size", mem_size)
        self.mem_size = mem_size
        self.exemplars: list[Any] = []
        """One dataset per task, with the first choices of all classes first."""
        self.class_means: dict[int, Tensor] = {}
        """By class, vectors of norm 1 of shape (tasks with this class, width)."""
        self._ranks: list[list[int]] = []
        self._old_model: nn.Module | None = None

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check that the experience is a whole task, and that there is one head for all tasks."""
        check_whole_task(strategy.experience)
        check_one_head(self, strategy.model)

    def after_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Add the exemplars to the training data."""
        if self.exemplars:
            strategy.adapted_dataset = concat_datasets([strategy.adapted_dataset, *self.exemplars])

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Replace the loss by iCaRL's."""
        outputs = strategy.mb_output
        check_logits("ICaRLPlugin", outputs)
        check_class_ids("ICaRLPlugin's targets", strategy.mb_y)
        labels = F.one_hot(strategy.mb_y, outputs.shape[1]).to(outputs)
        strategy.loss = F.binary_cross_entropy_with_logits(outputs, labels)
        if self._old_model is not None:
            with torch.no_grad():
                old = self._old_model(strategy.mb_x)
            known = outputs[:, : old.shape[1]]
            strategy.loss += F.binary_cross_entropy_with_logits(known, old.sigmoid())

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """At the end of a task: choose exemplars, copy the network, and compute the class means."""
        self._choose(strategy)
        self._compute_means(strategy)
        self._old_model = copy.deepcopy(strategy.model).requires_grad_(False).eval()
        self._old_model.zero_grad()

    def _choose(self, strategy: Any) -> None:
        """Choose exemplars of this task, and drop some of earlier tasks."""
        data = strategy.experience.dataset
        features, targets = dataset_features(data, strategy)
        features = F.normalize(features)
        seen = sum(ranks.count(0) for ranks in self._ranks)
        share = max(1, self.mem_size // (seen + len(targets.unique())))
        chosen = []
        for label in targets.unique():
            (of_class,) = torch.nonzero(targets == label, as_tuple=True)
            best = of_class[herd(features[of_class], share)].tolist()
            chosen += list(enumerate(best))
        chosen.sort()
        for i, ranks in enumerate(self._ranks):
            fewer = sum(rank < share for rank in ranks)
            self._ranks[i] = ranks[:fewer]
            self.exemplars[i] = self.exemplars[i].subset(range(fewer))
        self._ranks.append([rank for rank, _ in chosen])
        self.exemplars.append(data.train().subset([index for _, index in chosen]))

    def _compute_means(self, strategy: Any) -> None:
        found: dict[int, list[Tensor]] = {}
        for data in self.exemplars:
            views, targets = dataset_features(data, strategy, lambda *x: _views(strategy.model, *x))
            points = F.normalize(views, dim=2)
            for label in targets.unique():
                mean = F.normalize(points[targets == label].mean((0, 1)), dim=0)
                found.setdefault(int(label), []).append(mean)
        self.class_means = {label: torch.stack(means) for label, means in found.items()}

    def after_eval_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Predict by the nearest class mean."""
        if not self.class_means:
            return
        with penultimate_features(strategy.model) as features:
            strategy.forward()
        points = F.normalize(features[-1])
        scores = torch.full_like(strategy.mb_output, -_FARTHEST, dtype=points.dtype)
        for label, means in self.class_means.items():
            scores[:, label] = -(points[:, None] - means).square().sum(2).amin(1)
        strategy.mb_output = scores


def _views(model: nn.Module, x: Tensor, *task: Tensor) -> Tensor:
    """Features of examples and, of images, of their mirror images; of shape (examples, views,
    width)."""
    with penultimate_features(model) as features:
        for view in [x, x.flip(-1)] if x.dim() == 4 else [x]:
            model(view, *task)
    return torch.stack(features, 1)


def herd(features: Tensor, count: int) -> Tensor:
    """Choose examples whose mean is close to the mean of all (the paper's Algorithm 4).

    Greedily, one after another, so that the first few are themselves a good choice.

    :param features: of shape (examples, width).
    :param count: number of examples to choose; all if there are fewer.
    :return: indices of the chosen examples, the first choice first.
    """
    goal, total = features.mean(0), torch.zeros_like(features[0])
    chosen: list[int] = []
    for k in range(1, min(count, len(features)) + 1):
        distances = ((total + features) / k - goal).square().sum(1)
        distances[chosen] = torch.inf
        chosen.append(int(distances.argmin()))
        total = total + features[chosen[-1]]
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")
