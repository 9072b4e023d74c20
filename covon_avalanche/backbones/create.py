"""Create a backbone by name, with a head for a given number of classes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from covon_avalanche.backbones.libraries import BUILD, library_and_model, resample_positions
from covon_avalanche.checks import check_whole


def create_backbone(
    name: str,
    num_classes: int,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
) -> nn.Module:
    """A network whose last layer has ``num_classes`` outputs. It is new, unless the weights have a
    head of this size, such as ImageNet's of 1000 classes.

    :param name: ``LIBRARY/MODEL`` with torchvision, timm (``MODEL.TAG`` names the weights) or
        open_clip (``MODEL:TAG``, the image tower with a linear head), or one of ``ALIASES``.
    :param num_classes: outputs of the last layer.
    :param weights: ``None`` for random weights, ``"default"`` to download the library's, or the
        path of a ``.safetensors`` or ``.pth`` file. Of a complete CLIP the image tower is used.
    :param image_size: height and width of the input, for networks with a fixed input size; others
        ignore it. The position embedding of a ViT is resampled from the weights' image size.
    :param class_names: keep the text tower of a CLIP, too, as attribute ``text``, which embeds
        these names, in the order of the labels.
    :raises ValueError: for an unknown name, weights that do not fit, with their keys, or cannot be
        downloaded, or class names for a network without text tower.
    :raises ImportError: if the library is not installed.
    """
    check_whole("num_classes", num_classes)
    library, model_name = library_and_model(name)
    file = None
    if weights not in (None, "default"):
        wrapper = r"^(module\.|_orig_mod\.)+|(?<=\.)_orig_mod\."  # DataParallel, torch.compile
        read = _read_weights(Path(str(weights)))
        file = {re.sub(wrapper, "", key): tensor for key, tensor in read.items()}
    options = {}
    if class_names is not None:
        if library != "open_clip":
            raise ValueError(
                f"{name} has no text tower: choose a CLIP of open_clip, such as 'clip-b16'"
            )
        if len(class_names) != num_classes:
            raise ValueError(f"{num_classes} classes need as many names, got {len(class_names)}")
        options["class_names"] = class_names
    build = BUILD[library]
    try:
        model, heads = build(model_name, num_classes, weights == "default", image_size, **options)
    except (RuntimeError, OSError) as error:
        if weights != "default":
            raise
        what = " ".join(str(error).split())
        raise ValueError(f"the weights of {name} cannot be downloaded or loaded: {what}") from error
    if file is None:
        return model
    if library == "open_clip" and "logit_scale" in file:  # both towers
        file = {
            key if key.startswith("visual.") else f"text.clip.{key}": tensor
            for key, tensor in file.items()
            if key.startswith("visual.") or class_names is not None
        }
    elif class_names is not None and not any(key.startswith("text.") for key in file):
        raise ValueError(f"{weights} has no text tower, which class names need")
    file = resample_positions(file, model)
    prefixes = tuple(f"{head}." for head in heads)
    used = {key: value for key, value in model.state_dict().items() if key.startswith(prefixes)}
    used |= {
        key: tensor
        for key, tensor in file.items()
        if not key.startswith(prefixes) or tensor.shape[:1] == (num_classes,)
    }
    try:
        model.load_state_dict(used)
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit {name}: {error}") from error
    return model


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors or torch file by name, without running code from it."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch advises to run the code in the file
        raise ValueError(
            f"{path} holds no weights that can be loaded safely: it is no file of torch.save, or "
            "holds other objects than tensors, such as a whole model: save its state_dict()"
        ) from error
    except Exception as error:  # of safetensors, torch or zipfile
        raise ValueError(f"{path} holds no weights that can be loaded safely: {error}") from error
    for key in ("state_dict", "model"):  # as saved by training scripts
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) for name, x in content.items()
    ):
        raise ValueError(f"{path} must hold tensors by name, and nothing else")
    return content
