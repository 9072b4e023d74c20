"""CODA-Prompt: prefixes that are sums of components, weighted by attention to the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.prompted_vit import check_prefix_length

PREFIXED = 5  # first layers, as published


class CODAPrompt(PromptModel):
    """CODA-Prompt (Smith et al., "CODA-Prompt: COntinual Decomposed Attention-based Prompting for
    Rehearsal-Free Continual Learning", CVPR 2023).

    The first five layers have a prefix: a sum of components ``P_m``, weighted by the cosine
    similarity of keys ``K_m`` with the frozen feature ``q`` of the image, elementwise times an
    attention vector ``A_m``:

        prefix = sum_m cos(q * A_m, K_m) P_m

    over the components of all domains that have begun. Each domain trains its own, ``pool //
    num_domains`` per layer; earlier ones are frozen. At the start of a domain its components, keys
    and attention vectors are made orthonormal and orthogonal to those of earlier domains. The
    orthogonality penalty is omitted; its weight is 0 in the authors' settings. The head is shared,
    and classes are never masked (the authors mask those of earlier tasks in training).

    :param pool: components per layer, of all domains; the remainder of ``pool / num_domains`` is
        not used.
    :param length: tokens of a component; half of them are keys, half are values of the attention.
    :raises ValueError: if the features are too narrow for that many orthogonal components.

    See :class:`PromptModel` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        pool: int = 100,
        length: int = 8,
    ) -> None:
        super().__init__(network, num_domains)
        check_prefix_length("length", length)
        if pool < num_domains:
            raise ValueError(f"pool must be >= num_domains = {num_domains}, got {pool}")
        width, feature_width = self.vit.width, self.vit.feature_width
        own = pool // num_domains
        if own * num_domains > min(feature_width, length * width):
            raise ValueError(
                f"pool must be <= {min(feature_width, length * width)}, the width of the features, "
                f"so that components can be orthogonal, got {pool}"
            )

        def vectors(*shape: int) -> nn.ParameterList:
            shape = (min(PREFIXED, self.vit.depth), own, *shape)
            return nn.ParameterList(self.new_empty(*shape).normal_() for _ in range(num_domains))

        self.components = vectors(length, width)
        self.keys = vectors(feature_width)
        self.attention = vectors(feature_width)

    @torch.no_grad()
    def begin_domain(self) -> None:
        """See :class:`PromptModel`; orthonormalise what the domain will train."""
        super().begin_domain()
        for of in (self.components, self.keys, self.attention):
            own = of[self.domain]
            vectors = torch.cat([*of][: self.domain + 1], 1).flatten(2)
            own.copy_(_gram_schmidt(vectors)[:, -own.shape[1] :].view_as(own))

    def prefix_tokens(self, x: Tensor) -> Tensor:
        """The weighted sums of the components, of shape (layers, batch, length, width)."""
        components, keys, attention = (
            _earlier_detached([*of][: max(1, int(self.domains))])
            for of in (self.components, self.keys, self.attention)
        )
        q = self.vit.query(x).to(keys)
        # cos(q * A, K) without tensors of shape (batch, components, width).
        products = torch.einsum("bd,lmd->lbm", q, attention * F.normalize(keys, dim=-1))
        squares = torch.einsum("bd,lmd->lbm", q.square(), attention.square())
        weights = products / squares.clamp_min(1e-24).sqrt()
        return torch.einsum("lbm,lmtd->lbtd", weights, components)

    def training_logits(self, x: Tensor) -> Tensor:
        """See :class:`PromptModel`; the same in training and evaluation."""
        prefixes = [tokens.chunk(2, 1) for tokens in self.prefix_tokens(x)]
        return self.head(self.vit(x, prefixes=dict(enumerate(prefixes))))

    def predicted_logits(self, x: Tensor) -> Tensor:
        return self.training_logits(x)


def _earlier_detached(domains: Sequence[Tensor]) -> Tensor:
    """Components of all domains, of shape (layers, components, ...); only the last has a gradient,
    also in a model that has loaded a state dict within a domain."""
    *earlier, current = domains
    return torch.cat([*(p.detach() for p in earlier), current], 1)


def _gram_schmidt(vectors: Tensor) -> Tensor:
    """Orthonormal vectors, each orthogonal to all before it; of shape (..., vectors, width)."""
    q, r = torch.linalg.qr(vectors.cpu().double().mT)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()  # those of Gram-Schmidt: r's diagonal is positive
    return (q * signs[..., None, :]).mT.to(vectors)
