"""Parameter-efficient fine-tuning of a ViT, with any optimizer: adapters or prompts, and a head."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_choice, check_whole
from covon_avalanche.prompting.prompted_vit import PromptedViT, take_classifier

Tuning = Literal["adapter", "prompt", "head"]


class AdaptFormer(nn.Module):
    """A bottleneck parallel to a block's MLP: ``0.1 * up(dropout(relu(down(x))))``.

    Chen et al., "AdaptFormer: Adapting Vision Transformers for Scalable Visual Recognition"
    (NeurIPS 2022), as RanPAC and APER use it: ``up`` starts at zero, so that the network's outputs
    are at first unchanged, and a tenth of the hidden values are dropped in training.

    :param width: of a token.
    :param bottleneck: width between ``down`` and ``up``.
    """

    def __init__(self, width: int, bottleneck: int = 64) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The output for tokens of shape (batch, tokens, width)."""
        return 0.1 * self.up(self.dropout(self.down(x).relu()))


class CosineClassifier(nn.Linear):
    """Scaled cosines between features and class weights: ``scale * cos(x, w)``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.scale = nn.Parameter(self.weight.new_ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        return self.scale * F.linear(F.normalize(x), F.normalize(self.weight))


class TunedViT(nn.Module):
    """A frozen ViT with few trained parameters: adapters or prompts, and the classifier.

    An ordinary module: any optimizer and strategy can train it, CoVON with a posterior over the
    trained parameters alone.

    :param network: see :class:`PromptedViT`; its classifier is trained.
    :param tuning: ``"adapter"``, an :class:`AdaptFormer` in each block; ``"prompt"``, tokens behind
        the class token; ``"head"``, the classifier alone.
    :param bottleneck: of adapters.
    :param prompts: number of prompt tokens.
    :param cosine: replace the classifier by a :class:`CosineClassifier`.
    """

    def __init__(
        self,
        network: nn.Module,
        tuning: Tuning = "adapter",
        *,
        bottleneck: int = 64,
        prompts: int = 10,
        cosine: bool = False,
    ) -> None:
        super().__init__()
        check_choice("tuning", tuning, get_args(Tuning))
        check_whole("bottleneck", bottleneck)
        check_whole("prompts", prompts)
        vit = PromptedViT(network)
        head = take_classifier(network).requires_grad_(True)
        self.vit = vit
        self.adapters, self.prompts = None, None
        if tuning == "adapter":
            made = [AdaptFormer(self.vit.width, bottleneck) for _ in range(self.vit.depth)]
            self.adapters = nn.ModuleList(made).to(head.weight.device).float()
        elif tuning == "prompt":
            self.prompts = nn.Parameter(head.weight.new_empty(prompts, vit.width).float())
            bound = 1 / math.sqrt(self.vit.width)
            nn.init.uniform_(self.prompts, -bound, bound)
        if cosine:
            head = CosineClassifier(head.in_features, head.out_features).to(head.weight)
        self.head = head

    def tuned_parameters(self) -> list[nn.Parameter]:
        """All parameters except the ViT's."""
        return [p for name, p in self.named_parameters() if not name.startswith("vit.")]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes)."""
        return self.head(self.vit(x, self.prompts, parallel_adapters=self.adapters))
