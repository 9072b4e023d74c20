"""Networks of torchvision, timm and open_clip by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from covon_avalanche.backbones.heads import outputs

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


def _torchvision(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    options: dict[str, Any] = {"weights": "DEFAULT" if pretrained else None}
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size
    model = get_model(name, **options)
    heads = [key for key, layer in model.named_modules() if outputs(layer) is not None]
    return model, heads[-1]


def _timm(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    timm = needs("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}")
    options = {} if image_size is None else {"img_size": image_size}
    model = timm.create_model(name, pretrained=pretrained, **options)
    return model, str(model.pretrained_cfg["classifier"])


class ImageTower(nn.Module):
    """The image side of a CLIP with a linear head on its embedding."""

    def __init__(self, visual: nn.Module, features: int) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(features, 1)

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


def _open_clip(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    visual: Any = create_clip(name, pretrained, image_size).visual
    return ImageTower(visual, visual.output_dim), "head"


#: From a model's name, whether to download weights, and the size to the network and its head.
BUILD: dict[str, Callable[[str, bool, int | None], tuple[nn.Module, str]]] = {
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
