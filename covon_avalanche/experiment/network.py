"""The network of a recipe or a bundle. Avalanche is imported for its MLP only."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import nn

from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.data_settings import Model, Perceptron


def build_network(
    model: Model,
    num_classes: int,
    input_shape: Sequence[int],
    weights: str | os.PathLike[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> nn.Module:
    """A network; backbones hold their weights with channels last, for which convolutions are
    faster.

    :param input_shape: shape of one example.
    :param weights: those of a backbone, as for ``create_backbone``.
    :param class_names: keep the text tower of a CLIP, for these names.
    """
    if isinstance(model, Perceptron):
        from avalanche.models import SimpleMLP

        return SimpleMLP(
            num_classes=num_classes,
            input_size=math.prod(input_shape),
            hidden_size=model.hidden_size,
            hidden_layers=model.hidden_layers,
            drop_rate=0,
        )
    backbone = create_backbone(
        model.backbone,
        num_classes,
        weights=weights,
        image_size=input_shape[-2],
        class_names=class_names,
    )
    return backbone.to(memory_format=torch.channels_last)
