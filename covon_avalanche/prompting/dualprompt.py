"""DualPrompt: prefixes shared by all domains, and prefixes of each domain, selected by keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.prompted_vit import check_prefix_length


class DualPrompt(PromptModel):
    """DualPrompt (Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-free Continual
    Learning", ECCV 2022), with the settings of its implementation by CODA-Prompt's authors.

    The attention of the first layers has general prefixes, which all domains train; that of later
    layers has expert prefixes, of which each domain trains its own. A domain has a key per expert
    layer. A test image uses in each layer the expert of the domain whose key has the largest cosine
    similarity with its frozen feature ``q``. To the loss of domain ``t`` is added

        ``key_weight`` * mean over the batch of the sum over the expert layers of 1 - cos(q, key_t)

    (CODA-Prompt's authors sum over the batch: their gradient of the keys is larger by the size of
    the batch, to which Adam is invariant.) The head is shared, and classes are never masked.

    :param general_length: tokens of a general prefix; half of them are keys, half are values.
    :param expert_length: tokens of an expert prefix.
    :param general_layers: layers with a general prefix, counted from 0; those that the network does
        not have are left out.
    :param expert_layers: layers with an expert prefix, likewise.
    :param key_weight: weight of the loss of the keys.
    :raises ValueError: if the network has none of the layers, or a layer is named twice.

    See :class:`PromptModel` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        general_length: int = 6,
        expert_length: int = 20,
        general_layers: Sequence[int] = (0, 1),
        expert_layers: Sequence[int] = (2, 3, 4),
        key_weight: float = 1.0,
    ) -> None:
        super().__init__(network, num_domains)
        check_prefix_length("general_length", general_length)
        check_prefix_length("expert_length", expert_length)
        check_positive("key_weight", key_weight, zero=True)
        self.general_layers = self.vit.existing_layers(general_layers)
        self.expert_layers = self.vit.existing_layers(expert_layers)
        if both := sorted({*self.general_layers} & {*self.expert_layers}):
            raise ValueError(f"general_layers and expert_layers must differ, both have {both}")
        self.key_weight = key_weight
        general, experts = len(self.general_layers), len(self.expert_layers)
        width, feature_width = self.vit.width, self.vit.feature_width
        self.general = nn.Parameter(self.new_empty(general, general_length, width).uniform_())
        self.experts = nn.ParameterList(
            self.new_empty(experts, expert_length, width).uniform_() for _ in range(num_domains)
        )
        self.keys = nn.ParameterList(
            self.new_empty(experts, feature_width).uniform_() for _ in range(num_domains)
        )

    def _similarities(self, x: Tensor, keys: Tensor) -> Tensor:
        """Cosines of shape (batch, domains, layers) with keys of (domains, layers, width)."""
        q = F.normalize(self.vit.query(x))
        return torch.einsum("bd,tld->btl", q, F.normalize(keys, dim=-1))

    def _logits(self, x: Tensor, experts: Iterable[Tensor]) -> Tensor:
        """With an expert prefix per layer, of shape (batch or 1, length, width)."""
        layers = [*self.general_layers, *self.expert_layers]
        prefixes = [tokens.chunk(2, 1) for tokens in (*self.general[:, None], *experts)]
        return self.head(self.vit(x, prefixes=dict(zip(layers, prefixes, strict=True))))

    def training_logits(self, x: Tensor) -> Tensor:
        similarities = self._similarities(x, self.keys[self.domain][None])
        self.auxiliary_loss = self.key_weight * (1 - similarities).sum((1, 2)).mean()
        return self._logits(x, self.experts[self.domain][:, None])

    def predicted_logits(self, x: Tensor) -> Tensor:
        learned = max(1, int(self.domains))
        chosen = self._similarities(x, torch.stack([*self.keys][:learned])).argmax(1)
        experts = torch.stack([*self.experts][:learned])
        return self._logits(x, [experts[chosen[:, i], i] for i in range(experts.shape[1])])
