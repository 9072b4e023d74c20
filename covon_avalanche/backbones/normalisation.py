"""Mean and standard deviation of the pixels that pretrained weights were trained with."""

from __future__ import annotations

from typing import Any

from covon_avalanche.backbones.libraries import library_and_model, optional_import, timm_config

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Colours = tuple[float, float, float]


def normalisation(name: str) -> dict[str, Colours]:
    """``mean`` and ``std`` of red, green and blue, for pixels in [0, 1].

    To be passed to the transforms: ``image_transforms(224, **normalisation("clip-b16"))``.

    :param name: a backbone as in ``create_backbone``; without a tag, the library's default
        weights are meant.
    :raises ValueError: for an unknown name.
    """
    library, model_name = library_and_model(name)
    mean, std = {"torchvision": _torchvision, "timm": _timm, "open_clip": _open_clip}[library](
        model_name
    )
    return {"mean": _floats(mean), "std": _floats(std)}


def _torchvision(name: str) -> tuple[Any, Any]:
    from torchvision.models import get_model_weights, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    transforms = get_model_weights(name).DEFAULT.transforms()
    return getattr(transforms, "mean", IMAGENET[0]), getattr(transforms, "std", IMAGENET[1])


def _timm(name: str) -> tuple[Any, Any]:
    config = timm_config(name)
    return config.mean, config.std


def _open_clip(name: str) -> tuple[Any, Any]:
    open_clip = optional_import("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    config = open_clip.get_pretrained_cfg(model_name, tag) if tag else {}
    if tag and not config:
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    mean = config.get("mean") or open_clip.OPENAI_DATASET_MEAN
    return mean, config.get("std") or open_clip.OPENAI_DATASET_STD


def _floats(values: Any) -> Colours:
    red, green, blue = map(float, values)
    return red, green, blue
