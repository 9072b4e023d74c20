"""Networks of torchvision, timm and open_clip by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from covon_avalanche.backbones.heads import outputs, replace_head, without_auxiliary

#: Short names for what the domain-incremental literature uses, with their exact weight tags.
ALIASES = {
    "vit-b16-in21k-ft-in1k": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit-b16-in21k-ft-in1k-v2": "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit-b16-in1k": "timm/vit_base_patch16_224.augreg_in1k",
    "clip-b16": "open_clip/ViT-B-16-quickgelu:openai",
    "squeezenet": "torchvision/squeezenet1_1",
}


def library_and_model(name: str) -> tuple[str, str]:
    """The two parts of a backbone's name, or of what its alias stands for.

    :raises ValueError: for a name without a known library.
    """
    library, _, model_name = ALIASES.get(name, name).partition("/")
    if library not in BUILD or not model_name:
        raise ValueError(
            f"a backbone is named LIBRARY/MODEL with one of {sorted(BUILD)}, or is one of "
            f"{sorted(ALIASES)}; got {name!r}"
        )
    return library, model_name


Heads = tuple[str, ...]


def _torchvision(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, Heads]:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    options: dict[str, Any] = {"weights": "DEFAULT" if pretrained else None}
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size
    model = without_auxiliary(get_model(name, **options))
    *_, head = (key for key, layer in model.named_modules() if outputs(layer) is not None)
    if outputs(model.get_submodule(head)) != num_classes:
        replace_head(model, head, num_classes)
    return model, (head,)


def _timm(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, Heads]:
    settings = timm_settings(name)
    if not settings.classifier:
        raise ValueError(f"timm's {name!r} has no place for a classifier")
    options = {}
    if image_size is not None and settings.fixed_input_size:  # others take any
        options["img_size"] = image_size
    model = needs("timm").create_model(
        name, pretrained=pretrained, num_classes=num_classes, **options
    )
    heads = settings.classifier  # several in distilled networks
    return model, (heads,) if isinstance(heads, str) else tuple(heads)


def timm_settings(name: str) -> Any:
    """What timm knows about the weights of a model (``MODEL`` or ``MODEL.TAG``).

    :raises ValueError: for an unknown name.
    """
    timm = needs("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}")
    try:
        settings = timm.get_pretrained_cfg(name)
    except RuntimeError:  # timm's for an unknown tag
        settings = None
    if settings is None:
        raise ValueError(f"timm has no weights {name!r}")
    return settings


class ImageTower(nn.Module):
    """The image side of a CLIP with a linear head on its embedding."""

    def __init__(self, visual: nn.Module, features: int, num_classes: int) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.head(self.visual(images))


def create_clip(name: str, pretrained: bool, image_size: int | None) -> nn.Module:
    """Both sides of a CLIP.

    :param name: ``MODEL`` or ``MODEL:TAG``.
    """
    open_clip = needs("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    if pretrained and (model_name, tag) not in open_clip.list_pretrained():
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    options = {} if image_size is None else {"force_image_size": image_size}
    return open_clip.create_model(model_name, pretrained=tag if pretrained else None, **options)


def clip_features(name: str) -> int:
    """Length of a CLIP's embedding, which not every image side tells."""
    return needs("open_clip").get_model_config(name.partition(":")[0])["embed_dim"]


def _open_clip(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, Heads]:
    visual: Any = create_clip(name, pretrained, image_size).visual
    return ImageTower(visual, clip_features(name), num_classes), ("head",)


#: From a model's name, the number of classes, whether to download weights, and the size to the
#: network and the names of its heads.
BUILD: dict[str, Callable[[str, int, bool, int | None], tuple[nn.Module, Heads]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "open_clip": _open_clip,
}


def needs(package: str) -> Any:
    """An optional package, or an error that says how to install it."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"this backbone needs {package}: pip install 'covon_avalanche[vision]'"
        ) from error
