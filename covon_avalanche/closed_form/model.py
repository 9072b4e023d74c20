"""A frozen network with a classifier that is computed instead of trained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_class_ids
from covon_avalanche.closed_form.features import FeatureExtractor


class ClosedFormHead(nn.Module):
    """A classifier over features that is computed from sums over the examples of all domains.

    The sums are buffers, so that they are counted as memory and saved with the model.
    """

    num_classes: int

    @abstractmethod
    def begin_domain(self) -> None:
        """Start a domain, before its first examples; sums of an interrupted pass are discarded."""

    @abstractmethod
    def update(self, features: Tensor, labels: Tensor, first_index: int = 0) -> None:
        """Add examples of the current domain.

        :param features: of shape (batch, width).
        :param labels: class ids of shape (batch,).
        :param first_index: number of the first example within the domain. Views of one image
            have one number.
        """

    @abstractmethod
    def end_domain(self) -> None:
        """Compute the classifier over all domains."""


class ClosedFormModel(nn.Module):
    """Features of a frozen network, classified by a head in closed form.

    :param features: from inputs of shape (batch, ...) to features of shape (batch, width).
    :param head: of this width, such as a :class:`RidgeClassifier`.
    :param adapted: parameters of the network that a training loop adapts in the first domain before
        features are taken, such as those of adapters: the first phase of RanPAC. In training mode
        the model then returns the network's own outputs.
    :param flip: learn from each image and its mirror image, and average the scores of both.
    """

    domains: Tensor
    """How many domains have been learned."""

    def __init__(
        self,
        features: FeatureExtractor,
        head: ClosedFormHead,
        adapted: Iterable[nn.Parameter] = (),
        flip: bool = False,
    ) -> None:
        super().__init__()
        self.features, self.head, self.flip = features, head, flip
        self.register_buffer("domains", torch.zeros((), dtype=torch.long, device="cpu"))
        self._adapted = list(adapted)

    def begin_domain(self) -> bool:
        """Return whether this domain adapts the network, which is unfrozen then."""
        adapts = bool(self._adapted) and int(self.domains) == 0
        for p in self._adapted:
            p.requires_grad_(adapts)
        return adapts

    def train(self, mode: bool = True) -> ClosedFormModel:
        """Stay in evaluation mode, except where the network is adapted."""
        super().train(mode)
        self.features.network.train(mode and bool(self._adapted) and int(self.domains) == 0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Scores of shape (batch, classes), in float32 whatever the context."""
        if self.features.network.training:
            return self.features.network(x)
        with torch.autocast(x.device.type, enabled=False):
            scores = [self.head(self.features(view)) for view in self._views(x)]
        return torch.stack(scores).mean(0)

    def _views(self, x: Tensor) -> list[Tensor]:
        return [x, x.flip(-1)] if self.flip else [x]

    @torch.no_grad()
    def learn(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Add a domain, in one pass over its images.

        :param batches: inputs and labels, with the evaluation transform.
        :raises ValueError: for a domain without examples, or labels that are no class ids.
        """
        self.features.network.requires_grad_(False).eval()
        self.head.begin_domain()
        examples = 0
        with torch.autocast(self.domains.device.type, enabled=False):  # as in predictions
            for x, labels, *_ in batches:
                check_class_ids("labels", labels)
                classes = self.head.num_classes
                if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
                    found = sorted({int(y) for y in labels})
                    raise ValueError(f"labels must be between 0 and {classes - 1}, got {found}")
                for view in self._views(x):
                    self.head.update(self.features(view), labels.long(), examples)
                examples += len(labels)
            if not examples:
                raise ValueError("a domain has no training examples")
            self.head.end_domain()
        self.domains += 1
