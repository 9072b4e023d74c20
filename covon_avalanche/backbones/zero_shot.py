"""Zero-shot heads for CLIP: class names instead of training (Radford et al., ICML 2021).

The head's row of a class is the mean, over prompt templates, of the normalised text embedding of
the prompt with the class name, normalised again and multiplied by the logit scale. On normalised
image embeddings its outputs are CLIP's logits. It is an ordinary linear layer, which can be
trained or frozen like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covon_avalanche.backbones.libraries import clip_features, create_clip, optional_import
from covon_avalanche.backbones.weights import load_weights, read_weights

Template = str | Callable[[str], str]


class ZeroShotTower(nn.Module):
    """The image tower of a CLIP with a linear head on its normalised embedding."""

    def __init__(self, visual: nn.Module, features: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.visual = visual
        self.text_head = nn.Linear(features, classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images, of shape (batch, classes)."""
        return self.text_head(functional.normalize(self.visual(images), dim=-1))


def zero_shot(
    model_name: str,
    class_names: Sequence[str],
    templates: Sequence[Template],
    weights: str | os.PathLike[str] | None,
    image_size: int | None = None,
) -> ZeroShotTower:
    """The image tower of a CLIP with a zero-shot head.

    :param model_name: ``MODEL`` or ``MODEL:TAG`` of open_clip.
    :param class_names: in words; underscores become spaces.
    :param templates: prompts with the name at ``{}``, or functions of the name.
    :param weights: ``"default"``, or a file with a complete CLIP or with the state of a
        :class:`ZeroShotTower`, whose head is used as it is.
    :raises ValueError: without pretrained weights, because random text embeddings are
        meaningless.
    """
    if weights is None:
        raise ValueError(
            "class_names need pretrained weights, 'default' or a file: the embeddings of a "
            "randomly initialised text tower are meaningless"
        )
    if isinstance(templates, str) or not templates:
        raise ValueError(f"templates must be a list of at least one, got {templates!r}")
    file = None if weights == "default" else read_weights(Path(weights))
    clip: Any = create_clip(model_name, file is None, image_size)
    bias = getattr(clip, "logit_bias", None)
    features = clip_features(model_name)
    tower = ZeroShotTower(clip.visual, features, len(class_names), bias is not None)
    if file is not None and "text_head.weight" in file:
        load_weights(tower, file, str(weights))
        return tower
    if file is not None:
        load_weights(clip, file, str(weights))
    with torch.no_grad():
        tower.text_head.weight.copy_(_text_embeddings(clip, model_name, class_names, templates))
        if bias is not None:  # SigLIP
            tower.text_head.bias.copy_(clip.logit_bias.expand(len(class_names)))
    return tower


def is_text_tower(key: str, file: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a file with a complete CLIP is not part of the image tower."""
    return "logit_scale" in file and not key.startswith("visual.")


def _text_embeddings(
    clip: Any, model_name: str, class_names: Sequence[str], templates: Sequence[Template]
) -> Tensor:
    """Text embeddings times the logit scale, of shape (classes, features)."""
    open_clip = optional_import("open_clip")
    words = [name.replace("_", " ") for name in class_names]
    fillers = [t if callable(t) else t.format for t in templates]
    try:
        tokenizer = open_clip.get_tokenizer(model_name.partition(":")[0])
    except ModuleNotFoundError as error:  # transformers, for SigLIP
        raise ImportError(
            f"the tokenizer of {model_name} needs {error.name}: pip install {error.name}"
        ) from error
    training = clip.training
    try:
        columns = open_clip.build_zero_shot_classifier(clip.eval(), tokenizer, words, fillers)
    finally:
        clip.train(training)
    return clip.logit_scale.exp() * columns.T
