"""Selectors of the domain of an image, by the frozen network's features."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_whole

_COMPONENTS = 2  # Gaussians per domain; fewer for a domain with fewer images


def cosines(features: Tensor, vectors: Tensor) -> Tensor:
    """Cosine similarities of features, (batch, width), with vectors, (number, width): (batch,
    number). In float32 under autocast, too, where bfloat16 would round close ones to ties."""
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(features.float()) @ F.normalize(vectors.float(), dim=-1).T


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

    The selector of S-Prompts (Wang et al., "S-Prompts Learning with Pre-trained Transformers",
    NeurIPS 2022).

    :param width: of the features.
    :param num_domains: number of domains that will be learned.
    :param centres: per domain; a domain with fewer images has as many centres as images.
    """

    centres: Tensor

    def __init__(self, width: int, num_domains: int, centres: int = 5) -> None:
        super().__init__()
        check_whole("centres", centres)
        # A domain that has not been learned is infinitely far away.
        far = torch.tensor(torch.inf, dtype=torch.float32, device="cpu")
        self.register_buffer("centres", far.repeat(num_domains, centres, width))

    def fit(self, domain: int, features: Tensor) -> None:
        """Store the centres of a domain."""
        from sklearn.cluster import KMeans  # only here, because it takes seconds

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
        similarities = cosines(features, centres.flatten(0, 1)).unflatten(1, centres.shape[:2])
        missing = centres[..., 0].isinf()
        return 1 - similarities.masked_fill(missing, -torch.inf).amax(2)

    def distances(self, features: Tensor, p: int) -> Tensor:
        """L1 (``p = 1``) or L2 distances of normalised features to the nearest centre of each
        learned domain, of shape (batch, domains)."""
        centres = self.centres[: self.learned].float()
        distances = torch.cdist(F.normalize(features.float()), centres.flatten(0, 1), p=p)
        missing = centres[..., 0].isinf()  # whose L2 distances are NaN
        return distances.unflatten(1, centres.shape[:2]).masked_fill(missing, torch.inf).amin(2)

    def forward(self, features: Tensor) -> Tensor:
        centres = self.centres.flatten(0, 1).float()
        distances = torch.cdist(F.normalize(features.float()), centres, p=1)
        return distances.argmin(1) // self.centres.shape[1]


class MixtureSelector(DomainSelector):
    """SOYO's selector: a classifier trained on a domain's features and on samples of earlier ones.

    Wang et al., "Boosting Domain Incremental Learning: Selecting the Optimal Parameters is All You
    Need" (CVPR 2025), as in the authors' code, without the paper's fusion of several levels.
    Each domain is remembered as a mixture of Gaussians with full covariances. One classifier is
    kept across domains; after a domain it is trained with SGD, momentum 0.9, a cosine over the
    epochs, and batches with an equal share of each domain. Here its softmax is over the learned
    domains only; the authors' is also over domains to come. With t domains an epoch has t times the
    batches of the authors', because it passes over the features of all.

    :param width: of the features.
    :param num_domains: number of domains that will be learned.
    :param epochs: passes over as many features of each domain as the new one has images.
    :param batch_size: of all domains together.
    """

    weight: Tensor
    bias: Tensor
    log_shares: Tensor
    means: Tensor
    scales: Tensor

    def __init__(
        self,
        width: int,
        num_domains: int,
        *,
        epochs: int = 30,
        lr: float = 0.1,
        weight_decay: float = 2e-4,
        batch_size: int = 128,
    ) -> None:
        super().__init__()
        self.epochs, self.lr, self.weight_decay = epochs, lr, weight_decay
        self.batch_size = batch_size
        bound = 1 / math.sqrt(width)
        weight = torch.empty(num_domains, width, dtype=torch.float32, device="cpu")
        self.register_buffer("weight", weight.uniform_(-bound, bound))
        # A domain that has not been learned is never selected.
        self.register_buffer("bias", weight.new_full((num_domains,), -torch.inf))
        shape = num_domains, _COMPONENTS
        self.register_buffer("log_shares", weight.new_full(shape, -torch.inf))
        self.register_buffer("means", weight.new_zeros(*shape, width))
        # Lower triangular: a component is N(mean, scale scale^T).
        self.register_buffer("scales", weight.new_zeros(*shape, width, width))

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):  # see cosines
            weight, bias = self.weight.float(), self.bias.float()
            return F.linear(F.normalize(features.float()), weight, bias).argmax(1)

    def fit(self, domain: int, features: Tensor) -> None:
        """Train with the domain's features, and store their mixture."""
        if len(features) < 2:
            raise ValueError(f"a domain needs at least 2 images, got {len(features)}")
        features = F.normalize(features.float())
        self.bias[domain] = 0
        if domain > 0:
            self._train(domain, features)
        self._store(domain, features)

    def _store(self, domain: int, features: Tensor) -> None:
        from sklearn.mixture import GaussianMixture  # only here, because it takes seconds

        n = min(_COMPONENTS, len(features))
        # sklearn decomposes in the precision of the data: single is too little for wide features
        mixture = GaussianMixture(n, init_params="kmeans", random_state=0)
        mixture.fit(features.cpu().double().numpy())
        self.log_shares[domain] = -torch.inf
        self.log_shares[domain, :n] = torch.from_numpy(mixture.weights_).log()
        self.means[domain, :n] = torch.from_numpy(mixture.means_)
        self.scales[domain, :n] = torch.linalg.cholesky(torch.from_numpy(mixture.covariances_))

    def sample(self, domain: int, n: int) -> Tensor:
        """Features like those of a learned domain, of shape (n, width)."""
        chosen = self.log_shares[domain].exp().multinomial(n, replacement=True)
        rows = self.means[domain, chosen]
        noise = torch.randn_like(rows)
        for component in chosen.unique().tolist():
            own = chosen == component
            rows[own] += noise[own] @ self.scales[domain, component].T
        return rows

    @torch.enable_grad()
    def _train(self, domain: int, features: Tensor) -> None:
        n, learned = len(features), domain + 1
        new = self.batch_size // learned
        weight, bias = (
            part[:learned].float().clone().requires_grad_() for part in (self.weight, self.bias)
        )
        optimizer = torch.optim.SGD(
            [weight, bias], lr=self.lr, momentum=0.9, weight_decay=self.weight_decay
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        labels = torch.arange(learned, device=features.device).repeat_interleave(n)
        for _ in range(self.epochs):
            rows = torch.cat([*(self.sample(old, n).float() for old in range(domain)), features])
            order = torch.randperm(n * domain, device=features.device).split(self.batch_size - new)
            current = (n * domain + torch.randperm(n, device=features.device)).split(new)
            for parts in zip(order, current, strict=False):
                batch = torch.cat(parts)
                optimizer.zero_grad()
                F.cross_entropy(F.linear(rows[batch], weight, bias), labels[batch]).backward()
                optimizer.step()
            cosine.step()
        with torch.no_grad():
            self.weight[:learned], self.bias[:learned] = weight, bias
