"""The parts of vision transformers of timm and open_clip, by the same names.

A tower embeds images as tokens, the class token first (``embed``), normalises them
(``norm_before``), passes them through its ``blocks``, and turns tokens into features (``finish``).
``parts`` names a block's two norms, each followed by the scale of its branch. ``qkv`` and
``project`` are the linear maps before and behind a block's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tower_of(network: Any) -> TimmTower | ClipTower:
    """The parts of a network; see :class:`PromptedViT` for those that have them.

    :raises ValueError: for another network.
    """
    visual = getattr(network, "visual", network)
    found = type(visual).__name__
    other_pooling = f"prompts need a ViT that reads its class token, got {found} with other pooling"
    if hasattr(visual, "transformer") and hasattr(visual, "class_embedding"):
        is_token = getattr(visual, "pool_type", "tok") == "tok"
        if getattr(visual, "attn_pool", None) is not None or not is_token:
            raise ValueError(other_pooling)
        return ClipTower(visual)
    blocks = getattr(visual, "blocks", None)
    standard = isinstance(blocks, nn.Sequential) and all(
        all(hasattr(block, name) for name in (*TimmTower.parts, "attn", "mlp"))
        and hasattr(block.attn, "qkv")
        and getattr(block.attn, "gate", None) is None
        for block in blocks
    )
    if not standard or getattr(visual, "cls_token", None) is None:
        raise ValueError(
            "prompts and adapters need a ViT with a class token (timm's VisionTransformer or "
            f"open_clip's), got {found}"
        )
    if getattr(visual, "global_pool", "token") != "token":
        raise ValueError(other_pooling)
    return TimmTower(visual)


class TimmTower:
    """Parts of a timm ``VisionTransformer``."""

    parts = ("norm1", "ls1", "norm2", "ls2")

    def __init__(self, network: Any) -> None:
        self._network, self.blocks = network, network.blocks
        self.width = self.feature_width = network.embed_dim
        self.heads = network.blocks[0].attn.num_heads
        self.patch = network.patch_embed.patch_size
        self.norm_before = network.norm_pre

    @property
    def class_position(self) -> Tensor | float:
        embedding = self._network.pos_embed
        return 0.0 if embedding is None or self._network.no_embed_class else embedding[:, :1]

    def embed(self, x: Tensor) -> Tensor:
        return self._network._pos_embed(self._network.patch_embed(x))

    def qkv(self, attention: Any, x: Tensor) -> Sequence[Tensor]:
        q, k, v = (in_heads(part, self.heads) for part in attention.qkv(x).chunk(3, -1))
        return attention.q_norm(q), attention.k_norm(k), v

    def project(self, attention: Any, x: Tensor) -> Tensor:
        return attention.proj(attention.norm(x))

    def finish(self, tokens: Tensor) -> Tensor:
        return self._network.fc_norm(self._network.norm(tokens))


class ClipTower:
    """Parts of an open_clip image tower."""

    parts = ("ln_1", "ls_1", "ln_2", "ls_2")

    def __init__(self, network: Any) -> None:
        self._network, self.blocks = network, network.transformer.resblocks
        self.width = network.class_embedding.shape[0]
        self.feature_width = self.width if network.proj is None else network.proj.shape[1]
        self.heads = self.blocks[0].attn.num_heads
        self.patch = network.patch_size
        self.norm_before = network.ln_pre

    @property
    def class_position(self) -> Tensor:
        return self._network.positional_embedding[:1]

    def embed(self, x: Tensor) -> Tensor:
        patches = self._network.conv1(x).flatten(2).transpose(1, 2)
        first = self._network.class_embedding.to(patches.dtype).expand(len(x), 1, -1)
        return torch.cat([first, patches], 1) + self._network.positional_embedding

    def qkv(self, attention: Any, x: Tensor) -> Sequence[Tensor]:
        projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        return [in_heads(part, self.heads) for part in projected.chunk(3, -1)]

    def project(self, attention: Any, x: Tensor) -> Tensor:
        return attention.out_proj(x)

    def finish(self, tokens: Tensor) -> Tensor:
        tokens = self._network.ln_post(tokens)
        return tokens if self._network.proj is None else tokens @ self._network.proj


def in_heads(x: Tensor, heads: int) -> Tensor:
    """From (batch, tokens, width) to (batch, heads, tokens, width of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
