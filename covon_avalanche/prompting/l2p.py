"""L2P: a pool of prompts, of which each image uses those with the most similar keys."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.selectors import cosines


class L2P(PromptModel):
    """L2P (Wang et al., "Learning to Prompt for Continual Learning", CVPR 2022).

    All domains share a pool of prompts with keys. The ``top_k`` prompts whose keys have the largest
    cosine similarity with the frozen feature ``q`` of an image are inserted behind the class token,
    with its position embedding, and the head reads their mean output. To the loss is added

        - ``key_weight`` * mean over the batch of the sum over the chosen keys ``k`` of cos(q, k)

    As in the released code, training uses the ``top_k`` prompts that are chosen most often in a
    batch for all its images. The released code does the same at test time, where predictions
    then depend on the other images of the batch; here each test image uses its own prompts.
    Classes are never masked, and the backbone is frozen (the authors' configuration for CORe50
    trains it).

    :param pool: number of prompts, of all domains together.
    :param length: tokens per prompt.
    :param top_k: number of prompts that an image uses.
    :param key_weight: weight of the loss of the keys.
    :param batchwise: in training, use the same prompts for all images of a batch.

    See :class:`PromptModel` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        pool: int = 10,
        length: int = 5,
        top_k: int = 5,
        key_weight: float = 0.1,
        batchwise: bool = True,
    ) -> None:
        super().__init__(network, num_domains)
        check_whole("length", length)
        if not 1 <= top_k <= pool:
            raise ValueError(f"top_k must be between 1 and pool = {pool}, got {top_k}")
        check_positive("key_weight", key_weight, zero=True)
        self.top_k, self.key_weight, self.batchwise = top_k, key_weight, batchwise
        self.prompts = nn.Parameter(self.new_empty(pool, length, self.vit.width).uniform_(-1, 1))
        self.keys = nn.Parameter(self.new_empty(pool, self.vit.feature_width).uniform_(-1, 1))

    def _logits(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Logits with the prompts of the indices ``chosen``, of shape (batch, top_k)."""
        prompts = self.prompts[chosen].flatten(1, 2)
        return self.head(self.vit(x, prompts, prompt_positions=True, readout="prompts"))

    def training_logits(self, x: Tensor) -> Tensor:
        similarities = cosines(self.vit.query(x), self.keys)
        chosen = similarities.topk(self.top_k).indices
        if self.batchwise:
            counts = F.one_hot(chosen, len(self.keys)).sum((0, 1))
            most = counts.argsort(descending=True, stable=True)[: self.top_k]
            chosen = most.expand(len(x), -1)
        self.auxiliary_loss = -self.key_weight * similarities.gather(1, chosen).sum(1).mean()
        return self._logits(x, chosen)

    def predicted_logits(self, x: Tensor) -> Tensor:
        return self._logits(x, cosines(self.vit.query(x), self.keys).topk(self.top_k).indices)
