"""Networks of torchvision, timm and open_clip by name: with a new head, and their normalisation."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import interpolate_embeddings

from covon_avalanche.backbones.text_tower import TextTower
from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.last_layer import last_layer

Network = tuple[nn.Module, tuple[str, ...]]  # and the names of its heads
#: Short names of backbones in the domain-incremental literature, with their exact weight tags.
ALIASES = {
    "vit-b16-in21k-ft-in1k": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit-b16-in21k-ft-in1k-v2": "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit-b16-in1k": "timm/vit_base_patch16_224.augreg_in1k",
    "clip-b16": "open_clip/ViT-B-16-quickgelu:openai",
    "squeezenet": "torchvision/squeezenet1_1",
}


def library_and_model(name: str) -> tuple[str, str]:
    """The two parts of a backbone's name or alias.

    :raises ValueError: for a name without a known library.
    """
    library, _, model_name = ALIASES.get(name, name).partition("/")
    if library not in BUILD or not model_name:
        raise ValueError(
            f"a backbone is named LIBRARY/MODEL with one of {sorted(BUILD)}, or is one of "
            f"{sorted(ALIASES)}; got {name!r}{did_you_mean(name, ALIASES)}"
        )
    return library, model_name


def _optional_import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"this backbone needs {package}: pip install 'covon_avalanche[vision]'"
        ) from error


def _torchvision(name: str, num_classes: int, pretrained: bool, image_size: int | None) -> Network:
    if name in ("googlenet", "inception_v3"):
        raise ValueError(f"torchvision's {name!r} has auxiliary outputs, which are not supported")
    if image_size is not None and name.startswith("vit_"):
        model = models.get_model(name, image_size=image_size)
        if pretrained:
            state = models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
            model.load_state_dict(resample_positions(state, model))
    else:
        model = models.get_model(name, weights="DEFAULT" if pretrained else None)
    head = last_layer(model)
    _replace_head(model, head, num_classes)
    return model, (head,)


def _replace_head(model: nn.Module, name: str, num_classes: int) -> None:
    """Replace the last layer, unless it has ``num_classes`` outputs."""
    old: Any = model.get_submodule(name)
    if len(old.weight) == num_classes:
        return
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None).to(old.weight)
    else:  # the convolution of SqueezeNet
        new = nn.Conv2d(old.in_channels, num_classes, old.kernel_size).to(old.weight)
        nn.init.normal_(new.weight, std=0.01)
        nn.init.zeros_(new.bias)  # type: ignore[arg-type]
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, new)


def _timm(name: str, num_classes: int, pretrained: bool, image_size: int | None) -> Network:
    config = _timm_config(name)
    if not config.classifier:
        raise ValueError(f"timm's {name!r} has no classifier")
    options: dict[str, Any] = {}
    if image_size is not None and config.fixed_input_size:
        options["img_size"] = image_size
    if "natively QuickGELU" in "".join(config.notes or ()) and "quickgelu" not in name:
        options["act_layer"] = "quick_gelu"  # of these weights, but not of the model's name
    model = _optional_import("timm").create_model(
        name, pretrained=pretrained, num_classes=num_classes, **options
    )
    heads = config.classifier  # several in distilled networks
    return model, (heads,) if isinstance(heads, str) else tuple(heads)


def _timm_config(name: str) -> Any:
    """timm's configuration of the weights of ``MODEL`` or ``MODEL.TAG``."""
    try:
        config = _optional_import("timm").get_pretrained_cfg(name)
    except RuntimeError:  # for an unknown tag
        config = None
    if config is None:
        raise ValueError(f"timm has no model or weights {name!r}")
    return config


class ImageTower(nn.Module):
    """The image tower of a CLIP with a linear head on its embedding.

    :param text: the text tower, which methods for CLIP use; ``forward`` does not.
    """

    def __init__(
        self, visual: nn.Module, features: int, num_classes: int, text: TextTower | None = None
    ) -> None:
        super().__init__()
        self.visual, self.text = visual, text
        self.head = nn.Linear(features, num_classes).to(next(visual.parameters()))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images, of shape (batch, classes)."""
        return self.head(self.visual(images))


def _open_clip(
    name: str,
    num_classes: int,
    pretrained: bool,
    image_size: int | None,
    class_names: Sequence[str] | None = None,
) -> Network:
    open_clip = _optional_import("open_clip")
    model_name, tag, config = _clip_and_tag(name)
    if pretrained and not tag:
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    quick = config.get("quick_gelu", False)  # not of a model's name alone
    options = {"force_quick_gelu": quick, "force_image_size": image_size}
    if pretrained:
        clip = open_clip.create_model(model_name, pretrained=tag, **options)
    else:
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # open_clip warns about random weights
        try:
            clip = open_clip.create_model(model_name, **options)
        finally:
            logging.disable(disabled)
    features = open_clip.get_model_config(model_name)["embed_dim"]
    visual, text = clip.visual, None
    if class_names is not None:
        text = TextTower(clip, open_clip.get_tokenizer(model_name), class_names)
    return ImageTower(visual, features, num_classes, text), ("head",)


def _clip_and_tag(name: str) -> tuple[str, str, dict[str, Any]]:
    """Model and tag of open_clip, and what the tag tells beside the weights."""
    open_clip = _optional_import("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    config = open_clip.get_pretrained_cfg(model_name, tag) if tag else {}
    if tag and not config:
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    return model_name, tag, config


def resample_positions(weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The weights of a ViT with position embeddings for the model's images."""
    parameters = model.state_dict()
    if "encoder.pos_embedding" in weights.keys() & parameters.keys():  # torchvision's
        return interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(weights))
    for key in {"pos_embed", "visual.positional_embedding"} & weights.keys() & parameters.keys():
        stored, wanted = weights[key], parameters[key]
        grid = getattr(model.patch_embed if key == "pos_embed" else model.visual, "grid_size", None)
        if stored.shape == wanted.shape or grid is None or wanted.dim() > 3:
            continue
        resampled = _optional_import("timm.layers").resample_abs_pos_embed(
            stored.reshape(1, -1, stored.shape[-1]),
            new_size=list(grid),
            num_prefix_tokens=wanted.shape[-2] - math.prod(grid),
        )
        weights = weights | {key: resampled.view_as(wanted)}
    return weights


#: By library: from model name, number of classes, whether to download weights, and image size to
#: the network and the names of its heads. That of open_clip also takes names of classes.
BUILD: dict[str, Callable[..., Network]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "open_clip": _open_clip,
}


def normalisation(name: str) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` of red, green and blue, for pixels in [0, 1].

    To be passed to the transforms: ``image_transforms(224, **normalisation("clip-b16"))``.

    :param name: a backbone as in ``create_backbone``; without a tag, the library's default
        weights are meant.
    :raises ValueError: for an unknown name.
    """
    library, model_name = library_and_model(name)
    if library == "torchvision":
        transforms = models.get_model_weights(model_name).DEFAULT.transforms()
        mean, std = transforms.mean, transforms.std
    elif library == "timm":
        config = _timm_config(model_name)
        mean, std = config.mean, config.std
    else:
        open_clip = _optional_import("open_clip")
        *_, found = _clip_and_tag(model_name)
        mean = found.get("mean") or open_clip.OPENAI_DATASET_MEAN
        std = found.get("std") or open_clip.OPENAI_DATASET_STD
    return {"mean": tuple(map(float, mean)), "std": tuple(map(float, std))}
