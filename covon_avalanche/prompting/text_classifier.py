"""Classification of images by the names of the classes, with the text tower of a CLIP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.checks import check_whole


def new_contexts(owner: nn.Module, network: nn.Module, length: int, n: int) -> nn.ParameterList:
    """Token embeddings before class names, normal with standard deviation 0.02.

    :param owner: of the contexts, for the error.
    :param length: tokens of a context.
    :param n: number of contexts.
    :raises ValueError: for a network without text tower.
    """
    text: Any = getattr(network, "text", None)
    if text is None:
        raise ValueError(
            f"{type(owner).__name__} needs a CLIP with its text tower: create it with "
            "create_backbone(name, num_classes, class_names=...) and a backbone of open_clip, "
            f"got {type(network).__name__}"
        )
    check_whole("context", length)
    like = next(network.parameters())
    shape = length, text.width
    return nn.ParameterList(
        like.new_empty(shape, dtype=torch.float32).normal_(std=0.02) for _ in range(n)
    )


def text_logits(network: Any, features: Tensor, context: Tensor) -> Tensor:
    """Scaled cosines of image features and the names of the classes behind a context."""
    classes = F.normalize(network.text(context), dim=-1)
    logits: Tensor = network.text.scale * F.normalize(features, dim=-1) @ classes.T
    return logits
