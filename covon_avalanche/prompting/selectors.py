"""Which domain an image is from, by the frozen network's features."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor, nn


class DomainSelector(nn.Module, ABC):
    """Selects a domain for each image, by the frozen network's features."""

    @abstractmethod
    def fit(self, domain: int, features: Tensor) -> None:
        """Learn a domain.

        :param domain: its index, in the order of learning.
        :param features: of its images, of shape (images, width).
        """

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """The selected domain of each image, of shape (batch,)."""


class NearestCentre(DomainSelector):
    """The domain of the nearest K-means centre, by the L1 distance of normalised features.

    Of S-Prompts (Wang et al., "S-Prompts Learning with Pre-trained Transformers", NeurIPS 2022).

    :param width: of the features.
    :param num_domains: number of domains that will be learned.
    :param centres: per domain; a domain with fewer images has as many centres as images.
    """

    centres: Tensor

    def __init__(self, width: int, num_domains: int, centres: int = 5) -> None:
        super().__init__()
        if centres < 1:
            raise ValueError(f"centres must be >= 1, got {centres}")
        # A domain that has not been learned is infinitely far away.
        self.register_buffer("centres", torch.full((num_domains, centres, width), torch.inf))

    def fit(self, domain: int, features: Tensor) -> None:
        """Store the centres of a domain."""
        n_clusters = min(self.centres.shape[1], len(features))
        means = KMeans(n_clusters, n_init=10, random_state=0)
        means.fit(F.normalize(features.float()).cpu().numpy())
        self.centres[domain] = torch.inf
        self.centres[domain, :n_clusters] = torch.from_numpy(means.cluster_centers_)

    @property
    def learned(self) -> int:
        """How many domains have centres."""
        return int(self.centres[:, 0, 0].isfinite().sum())

    def cosine_distances(self, features: Tensor) -> Tensor:
        """1 - cosine to the nearest centre of each learned domain, of shape (batch, domains)."""
        centres = self.centres[: self.learned]
        similarities = F.normalize(features.float()) @ F.normalize(centres, dim=-1).flatten(0, 1).T
        similarities = similarities.unflatten(1, centres.shape[:2])
        missing = centres[..., 0].isinf()
        return 1 - similarities.masked_fill(missing, -torch.inf).amax(2)

    def forward(self, features: Tensor) -> Tensor:
        """See :class:`DomainSelector`."""
        distances = torch.cdist(F.normalize(features.float()), self.centres.flatten(0, 1), p=1)
        return distances.argmin(1) // self.centres.shape[1]
