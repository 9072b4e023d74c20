"""PINA: prompts and adapters for each domain, and one classifier, of the first domain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor, nn

from covon_avalanche.checks import check_choice, check_whole
from covon_avalanche.prompting.domain_prompts import DomainPrompts

AdapterInit = Literal["xavier", "zeros"]


class LinearAdapter(nn.Sequential):
    """``up(down(x))`` without a nonlinearity, with Xavier-initialised weights and zero biases.

    :param width: of input and output.
    :param bottleneck: width between ``down`` and ``up``.
    :param init: ``"zeros"`` sets the weights of ``up`` to zero, so that training starts at the
        pretrained network.
    """

    def __init__(self, width: int, bottleneck: int = 16, init: AdapterInit = "xavier") -> None:
        check_whole("bottleneck", bottleneck)
        check_choice("adapter_init", init, get_args(AdapterInit))
        down, up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        super().__init__(down, up)
        for name, p in self.named_parameters():
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.xavier_uniform_(p)
        if init == "zeros":
            nn.init.zeros_(up.weight)


class PINA(DomainPrompts):
    """PINA (Wang et al., "Non-Exemplar Domain Incremental Learning via Cross-Domain Concept
    Integration", ECCV 2024).

    The first domain trains its prompts and the classifier, which is then frozen. Each later domain
    trains its own prompts, and adapters with which its features fit this classifier: ``"deep"``,
    one behind each block, or ``"shallow"``, one on the final feature. For a test image, those of
    the domain with the nearest K-means centre of frozen features are used, as in the authors'
    code; the patch-shuffle selector of the paper is not implemented.

    :param adapter: where adapters are.
    :param bottleneck: of adapters.
    :param adapter_init: ``"xavier"`` as published, which perturbs the features at first, or
        ``"zeros"``, which needs fewer steps.
    :param context: with a CLIP and its text tower, as for :class:`SLiPrompts`, the classifier is
        the class names behind a learned context of so many tokens, 16 in the authors' code;
        ``None``: a linear layer.

    See :class:`DomainPrompts` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        prompts: int = 10,
        adapter: Literal["shallow", "deep"] = "deep",
        bottleneck: int = 16,
        adapter_init: AdapterInit = "xavier",
        centres: int = 5,
        context: int | None = None,
    ) -> None:
        check_choice("adapter", adapter, ("shallow", "deep"))
        contexts = None if context is None else self.new_contexts(network, context, 1)
        super().__init__(network, num_domains, prompts=prompts, centres=centres)
        self.context = None if contexts is None else contexts[0]
        if self.context is not None:
            del self.head
        self.adapter = adapter
        deep = adapter == "deep"
        width, number = (self.vit.width, self.vit.depth) if deep else (self.vit.feature_width, 1)
        self.adapters = nn.ModuleList(
            nn.ModuleList(LinearAdapter(width, bottleneck, adapter_init) for _ in range(number))
            for _ in range(num_domains - 1)
        ).to(self.prompts[0])
        """Adapters of each domain but the first."""

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The current domain's prompts, and the classifier or the domain's adapters."""
        own: Iterable[nn.Parameter]
        if self.domain > 0:
            own = self.adapters[self.domain - 1].parameters()
        else:
            own = self.head.parameters() if self.context is None else [self.context]
        return [self.prompts[self.domain], *own]

    def image_features(self, x: Tensor, domain: int) -> Tensor:
        adapters: Any = self.adapters[domain - 1] if domain > 0 else []
        if self.adapter == "deep":
            return self.vit(x, self.prompts[domain], adapters=adapters)
        features = self.vit(x, self.prompts[domain])
        for adapter in adapters:
            features = features + adapter(features)
        return features

    def classify(self, features: Tensor, domain: int) -> Tensor:
        """Logits of features, by the classifier of the first domain."""
        if self.context is None:
            return self.head(features)
        return self.text_logits(features, self.context)
