"""A frozen vision transformer with points where prompts, prefixes and adapters are inserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.prompting.towers import in_heads, tower_of

Prefix = Sequence[Tensor]
"""Keys and values, each of shape (batch or 1, length, width)."""
Adapter = Callable[[Tensor], Tensor]
"""Maps tokens of shape (batch, tokens, width) to what is added to them."""
Adapters = Sequence[Adapter] | nn.ModuleList


class PromptedViT(nn.Module):
    """A frozen vision transformer that takes prompts, prefixes and adapters.

    The network is frozen and stays in evaluation mode; its classifier is not used, see
    :func:`take_classifier`. What is inserted is trained by the methods that own it.

    Where things are inserted, with the methods that use it:

    - *prompts*: tokens behind the class token, without position embedding (S-Prompts, PINA, SOYO),
      or with that of the class token (L2P);
    - *prefixes*: keys and values put before those of a block's attention, not projected
      (DualPrompt, CODA-Prompt);
    - *adapters* behind a block, ``x + adapter(x)`` (PINA, SOYO), or *parallel* to its MLP,
      ``x + mlp(norm(x)) + adapter(x)`` (AdaptFormer in RanPAC and APER).

    :param network: a ``VisionTransformer`` of timm with a class token, or the image tower of an
        open_clip model, bare or in :class:`covon_avalanche.backbones.libraries.ImageTower`.
    :raises ValueError: for another network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._tower = tower_of(network)
        self.network = network.requires_grad_(False).eval()
        self.depth: int = len(self._tower.blocks)
        """Number of blocks."""
        self.width: int = self._tower.width
        """Width of a token."""
        self.feature_width: int = self._tower.feature_width
        """Width of the returned features; CLIP projects them."""

    def train(self, mode: bool = True) -> PromptedViT:
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def query(self, x: Tensor) -> Tensor:
        """Features without prompts, in float32, by which domains and prompts are selected."""
        return self(x).float()

    def forward(
        self,
        x: Tensor,
        prompts: Tensor | None = None,
        *,
        prefixes: Mapping[int, Prefix] | None = None,
        adapters: Adapters | None = None,
        parallel_adapters: Adapters | None = None,
        prompt_positions: bool = False,
        readout: Literal["class", "prompts"] = "class",
    ) -> Tensor:
        """Features of images, of shape (batch, ``feature_width``).

        :param x: images of shape (batch, 3, height, width).
        :param prompts: tokens of shape (length, width) for all images, or (batch, length, width).
        :param prefixes: keys and values by block, counted from 0.
        :param adapters: one for each block.
        :param parallel_adapters: one for each block.
        :param prompt_positions: add the class token's position embedding to prompts.
        :param readout: the output of the class token, or the mean output of the prompts.
        :raises ValueError: if the image cannot be cut into patches.
        """
        height, width = x.shape[-2:]
        patch = self._tower.patch
        if height % patch[0] or width % patch[1]:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be cut into patches of "
                f"{patch[0]} x {patch[1]}: choose a multiple"
            )
        tokens = self._tower.embed(x)
        length = 0
        if prompts is not None:
            length = prompts.shape[-2]
            prompts = prompts.expand(len(x), -1, -1).to(tokens.dtype)
            if prompt_positions:
                prompts = prompts + self._tower.class_position
            tokens = torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], 1)
        tokens = self._tower.norm_before(tokens)
        for i in range(self.depth):
            parallel = None if parallel_adapters is None else parallel_adapters[i]
            tokens = self._block(i, tokens, (prefixes or {}).get(i), parallel)
            if adapters:
                tokens = tokens + adapters[i](tokens)
        tokens = tokens[:, :1] if readout == "class" else tokens[:, 1 : 1 + length]
        return self._tower.finish(tokens).mean(1)

    def _block(self, i: int, x: Tensor, prefix: Prefix | None, parallel: Adapter | None) -> Tensor:
        block = self._tower.blocks[i]
        if prefix is None and parallel is None:
            return block(x)
        norm1, scale1, norm2, scale2 = (getattr(block, name) for name in self._tower.parts)
        x = x + scale1(self._attention(block.attn, norm1(x), prefix))
        added = scale2(block.mlp(norm2(x)))
        return x + added if parallel is None else x + added + parallel(x)

    def _attention(self, attention: nn.Module, x: Tensor, prefix: Prefix | None) -> Tensor:
        """Attention with the prefix before keys and values."""
        q, k, v = self._tower.qkv(attention, x)
        heads = self._tower.heads
        if prefix is not None:
            k, v = (
                torch.cat([in_heads(added.expand(len(x), -1, -1), heads).to(own.dtype), own], 2)
                for added, own in zip(prefix, (k, v), strict=True)
            )
        out = F.scaled_dot_product_attention(q, k, v)
        return self._tower.project(attention, out.transpose(1, 2).flatten(2))


def take_classifier(network: nn.Module) -> nn.Linear:
    """Remove the classifier of a ViT, and return it.

    :param network: of :func:`covon_avalanche.backbones.create_backbone`.
    :raises ValueError: if it has no linear classifier.
    """
    classifier = getattr(network, "head", None)
    if not isinstance(classifier, nn.Linear):
        raise ValueError(
            "prompts and adapters need a ViT with a linear classifier as its head: create it with "
            f"create_backbone(name, num_classes), got {type(network).__name__}"
        )
    network.head = nn.Identity()
    return classifier


def check_prefix_length(name: str, length: int) -> None:
    """Raise a ``ValueError`` unless half of the tokens can be keys, and half of them values."""
    if length < 2 or length % 2:
        raise ValueError(f"{name} must be even and >= 2, got {length}")
