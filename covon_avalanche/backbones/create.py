"""Create a backbone by name, with a head for a given number of classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from covon_avalanche.backbones.libraries import BUILD, library_and_model
from covon_avalanche.backbones.weights import load_weights, read_weights
from covon_avalanche.backbones.zero_shot import Template, is_text_tower, zero_shot


def create_backbone(
    name: str,
    num_classes: int,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
    templates: Sequence[Template] = ("a photo of a {}.",),
) -> nn.Module:
    """A network whose last layer is new, with ``num_classes`` outputs.

    :param name: ``LIBRARY/MODEL`` with torchvision, timm (``MODEL.TAG`` names the weights) or
        open_clip (``MODEL:TAG``, the image tower with a linear head), or one of ``ALIASES``.
    :param num_classes: outputs of the new layer.
    :param weights: ``None`` for random weights, ``"default"`` to download the library's, or the
        path of a ``.safetensors`` or ``.pth`` file. The file's head is used if it has
        ``num_classes`` outputs.
    :param image_size: height and width of the input, for networks with a fixed input size; others
        ignore it.
    :param class_names: for open_clip: use a zero-shot head, built from the text embeddings of
        these names (see :mod:`.zero_shot`). It needs pretrained weights, in a file those of both
        towers.
    :param templates: prompts with the name at ``{}``, whose embeddings are averaged, for example
        ``open_clip.OPENAI_IMAGENET_TEMPLATES``.
    :raises ValueError: for an unknown name, or weights that do not fit, with their keys.
    :raises ImportError: if the library is not installed.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be >= 1, got {num_classes}")
    library, model_name = library_and_model(name)
    if class_names is not None:
        if library != "open_clip" or len(class_names) != num_classes:
            raise ValueError(
                f"class_names are for open_clip's networks, one name a class; got "
                f"{len(class_names)} for {num_classes} classes and {name!r}"
            )
        return zero_shot(model_name, class_names, templates, weights, image_size)
    file = None if weights in (None, "default") else read_weights(Path(str(weights)))
    model, heads = BUILD[library](model_name, num_classes, weights == "default", image_size)
    if file is not None:
        head_keys = tuple(f"{head}." for head in heads)
        used = {
            key: tensor
            for key, tensor in file.items()
            if not (library == "open_clip" and is_text_tower(key, file))
            and not (key.startswith(head_keys) and tensor.shape[:1] != (num_classes,))
        }
        load_weights(model, used, str(weights), optional=head_keys)
    return model
