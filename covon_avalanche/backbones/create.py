"""A backbone by name, with a head for the classes at hand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from covon_avalanche.backbones.heads import AUXILIARY
from covon_avalanche.backbones.libraries import BUILD, library_and_model
from covon_avalanche.backbones.weights import load_weights, read_weights
from covon_avalanche.backbones.zero_shot import Template, is_text_side, zero_shot


def create_backbone(
    name: str,
    num_classes: int,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
    templates: Sequence[Template] = ("a photo of a {}.",),
) -> nn.Module:
    """A network whose last layer is new, for ``num_classes`` classes.

    :param name: ``LIBRARY/MODEL`` with torchvision, timm (``MODEL.TAG`` names the weights) or
        open_clip (``MODEL:TAG``, the image tower with a linear head), or one of ``ALIASES``.
    :param num_classes: outputs of the new layer.
    :param weights: ``None`` for random ones, ``"default"`` to let the library download those of
        the name, or the path of a ``.safetensors`` or ``.pth`` file. A layer for as many
        classes in it is taken over, one for others is replaced.
    :param image_size: height and width of the input, for networks built for one size; others
        take any.
    :param class_names: for open_clip's networks: the head is what their text side says about
        these names, so that they classify before any training (see :mod:`.zero_shot`). The
        weights must be pretrained and, in a file, those of both sides.
    :param templates: sentences with the name at ``{}``, whose embeddings are averaged, for
        example ``open_clip.OPENAI_IMAGENET_TEMPLATES``, the 80 of CLIP's authors.
    :raises ValueError: for an unknown name, or weights that do not fit, with their keys.
    :raises ImportError: where the library is not installed.
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
    if weights is not None and hasattr(model, "transform_input"):
        # GoogLeNet and Inception turn pixels normalised as for the others into what they learned
        model.transform_input = True  # type: ignore[assignment]
    if file is not None:
        optional = tuple(f"{head}." for head in heads)
        fitting = {
            key: tensor
            for key, tensor in file.items()
            if not _is_unused(library, key, file)
            and not (key.startswith(optional) and tensor.shape[:1] != (num_classes,))
        }
        load_weights(model, fitting, str(weights), optional=optional)
    return model


def _is_unused(library: str, key: str, file: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a file belongs to what is left out of a library's networks."""
    if library == "open_clip":
        return is_text_side(key, file)
    return library == "torchvision" and key.partition(".")[0] in AUXILIARY
