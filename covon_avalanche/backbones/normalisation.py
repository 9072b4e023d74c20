"""The mean and standard deviation of pixels that pretrained weights were trained with."""

from __future__ import annotations

from typing import Any

from covon_avalanche.backbones.libraries import library_and_model, needs, timm_settings

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Colours = tuple[float, float, float]


def normalisation(name: str) -> dict[str, Colours]:
    """``mean`` and ``std`` of red, green and blue, for pixels in [0, 1].

    They go to the streams' transforms: ``image_transforms(224, **normalisation("clip-b16"))``.

    :param name: of a backbone, as for ``create_backbone``; the weights' tag counts, where none
        is given those of the library's default weights.
    :raises ValueError: for an unknown name.
    """
    library, model_name = library_and_model(name)
    mean, std = {"torchvision": _torchvision, "timm": _timm, "open_clip": _open_clip}[library](
        model_name
    )
    return {"mean": _colours(mean), "std": _colours(std)}


def _torchvision(name: str) -> tuple[Any, Any]:
    from torchvision.models import get_model_weights, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    transforms = get_model_weights(name).DEFAULT.transforms()
    return getattr(transforms, "mean", IMAGENET[0]), getattr(transforms, "std", IMAGENET[1])


def _timm(name: str) -> tuple[Any, Any]:
    settings = timm_settings(name)
    return settings.mean, settings.std


def _open_clip(name: str) -> tuple[Any, Any]:
    open_clip = needs("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    settings = open_clip.get_pretrained_cfg(model_name, tag) if tag else {}
    if tag and not settings:
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    mean = settings.get("mean") or open_clip.OPENAI_DATASET_MEAN
    return mean, settings.get("std") or open_clip.OPENAI_DATASET_STD


def _colours(values: Any) -> Colours:
    red, green, blue = map(float, values)
    return red, green, blue
