"""CLIP's text side as the head of its image side (Radford et al., ICML 2021).

The head's row of a class is the mean over templates of the normalised embedding of the sentence
with the class's name, normalised and multiplied by the logit scale. Over normalised image
embeddings its outputs are CLIP's own logits; from there on it is an ordinary linear layer, to
be trained or frozen like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covon_avalanche.backbones.libraries import clip_features, create_clip, needs
from covon_avalanche.backbones.weights import load_weights, read_weights

Template = str | Callable[[str], str]


class ZeroShotTower(nn.Module):
    """The image side of a CLIP with a linear head on its normalised embedding."""

    def __init__(self, visual: nn.Module, features: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.visual = visual
        self.text_head = nn.Linear(features, classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.text_head(functional.normalize(self.visual(images), dim=-1))


def zero_shot(
    model_name: str,
    class_names: Sequence[str],
    templates: Sequence[Template],
    weights: str | os.PathLike[str] | None,
    image_size: int | None = None,
) -> ZeroShotTower:
    """A CLIP that classifies by the names of the classes.

    :param model_name: ``MODEL`` or ``MODEL:TAG`` of open_clip.
    :param class_names: in words; underscores count as blanks.
    :param templates: sentences with the name at ``{}``, or functions of the name.
    :param weights: ``"default"``, or a file with a whole CLIP, or one with the state of such a
        network, whose head is taken over as it is.
    :raises ValueError: without pretrained weights: a random text side says nothing.
    """
    if weights is None:
        raise ValueError(
            "class_names need pretrained weights, 'default' or a file: a randomly initialised "
            "text side says nothing about them"
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
        if bias is not None:  # as in SigLIP
            tower.text_head.bias.copy_(clip.logit_bias.expand(len(class_names)))
    return tower


def is_text_side(key: str, file: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a file with a whole CLIP is none of its image side."""
    return "logit_scale" in file and not key.startswith("visual.")


def _text_embeddings(
    clip: Any, model_name: str, class_names: Sequence[str], templates: Sequence[Template]
) -> Tensor:
    """Of shape (classes, features), times the logit scale."""
    open_clip = needs("open_clip")
    words = [name.replace("_", " ") for name in class_names]
    fillers = [t if callable(t) else t.format for t in templates]
    try:
        tokenizer = open_clip.get_tokenizer(model_name.partition(":")[0])
    except ModuleNotFoundError as error:  # transformers, for SigLIP and others
        raise ImportError(
            f"the words of {model_name} need {error.name}: pip install {error.name}"
        ) from error
    training = clip.training
    try:
        columns = open_clip.build_zero_shot_classifier(clip.eval(), tokenizer, words, fillers)
    finally:
        clip.train(training)
    return clip.logit_scale.exp() * columns.T
