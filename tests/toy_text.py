"""A small CLIP with both towers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from toy_vits import CLASSES, SIZE

from covon_avalanche.backbones.libraries import ImageTower
from covon_avalanche.backbones.text_tower import TextTower

NAMES = ["dog", "police_car", "fish"]


def whole_clip(**text: Any) -> Any:
    """open_clip's, with visible differences between texts; always the same weights."""
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    torch.manual_seed(0)
    vision = dict(image_size=SIZE, layers=3, width=16, head_width=8, patch_size=4, mlp_ratio=2.0)
    text = dict(context_length=30, width=16, heads=2, layers=2) | text
    clip = open_clip.model.CLIP(12, vision, text)
    for name, p in clip.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3 if "embedding" not in name else 1.0)
    return clip.eval()


@cache
def _tokenizer() -> Any:
    """Reads its vocabulary, which takes a tenth of a second."""
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    return open_clip.get_tokenizer("ViT-B-16")


def tokenize(texts: Any, context_length: int = 30) -> torch.Tensor:
    """CLIP's tokens."""
    tokens: torch.Tensor = _tokenizer()(texts, context_length=context_length)
    return tokens


def toy_clip_with_text(names: list[str] | None = None) -> nn.Module:
    """As of ``create_backbone``."""
    clip = whole_clip()
    visual, text = clip.visual, TextTower(clip, tokenize, names or NAMES)
    return ImageTower(visual, 12, CLASSES, text).eval()
