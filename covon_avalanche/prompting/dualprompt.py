"""DualPrompt: prefixes shared by all domains, and prefixes of each domain, selected by keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.prompted_vit import check_prefix_length
from covon_avalanche.prompting.selectors import cosines

_GENERAL, _EXPERTS = 2, 3  # layers with these prefixes, from the first, as published


class DualPrompt(PromptModel):
    """DualPrompt (Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-free Continual
    Learning", ECCV 2022), with the settings of the authors' code for ImageNet-R.

    The attention of the first two layers has general prefixes, which all domains train; that of the
    next three has expert prefixes, of which each domain trains its own, starting from those of the
    domain before. Each domain has one key. A test image uses the experts of the domain whose key
    has the largest cosine similarity with its frozen feature ``q``. To the loss of domain ``t`` is
    added

        ``key_weight`` * mean over the batch of 1 - cos(q, key_t)

    The head is shared, and classes are never masked (the authors mask those of other tasks in
    training). General and expert prefixes and keys begin uniformly in [-1, 1].

    :param general_length: tokens of a general prefix; half of them are keys, half are values.
    :param expert_length: tokens of an expert prefix, likewise.
    :param key_weight: weight of the loss of the keys.
    :raises ValueError: if the network has no layers for experts.

    See :class:`PromptModel` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        general_length: int = 10,
        expert_length: int = 40,
        key_weight: float = 1.0,
    ) -> None:
        super().__init__(network, num_domains)
        check_prefix_length("general_length", general_length)
        check_prefix_length("expert_length", expert_length)
        check_positive("key_weight", key_weight, zero=True)
        if (experts := min(_EXPERTS, self.vit.depth - _GENERAL)) < 1:
            raise ValueError(
                f"DualPrompt needs more than {_GENERAL} layers, got a network of {self.vit.depth}"
            )
        self.key_weight = key_weight

        def uniform(*shape: int) -> Tensor:
            return self.new_empty(*shape).uniform_(-1, 1)

        width = self.vit.width
        self.general = nn.Parameter(uniform(_GENERAL, general_length, width))
        self.experts = nn.ParameterList(
            uniform(experts, expert_length, width) for _ in range(num_domains)
        )
        self.keys = nn.ParameterList(uniform(self.vit.feature_width) for _ in range(num_domains))

    @torch.no_grad()
    def begin_domain(self) -> None:
        """See :class:`PromptModel`; copy the experts of the domain before."""
        super().begin_domain()
        if self.domain > 0:
            self.experts[self.domain].copy_(self.experts[self.domain - 1])

    def _logits(self, x: Tensor, experts: Iterable[Tensor]) -> Tensor:
        """Logits with an expert prefix per layer, of shape (batch or 1, length, width)."""
        prefixes = [tokens.chunk(2, 1) for tokens in (*self.general[:, None], *experts)]
        return self.head(self.vit(x, prefixes=dict(enumerate(prefixes))))

    def training_logits(self, x: Tensor) -> Tensor:
        similarities = cosines(self.vit.query(x), self.keys[self.domain][None])
        self.auxiliary_loss = self.key_weight * (1 - similarities).mean()
        return self._logits(x, self.experts[self.domain][:, None])

    def predicted_logits(self, x: Tensor) -> Tensor:
        learned = max(1, int(self.domains))
        chosen = cosines(self.vit.query(x), torch.stack([*self.keys][:learned])).argmax(1)
        return self._logits(x, torch.stack([*self.experts][:learned], 1)[:, chosen])
