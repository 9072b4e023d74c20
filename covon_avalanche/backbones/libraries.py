"""Networks of torchvision, timm and open_clip by name, each with a new head."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

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
            f"{sorted(ALIASES)}; got {name!r}"
        )
    return library, model_name


def optional_import(package: str) -> Any:
    """An optional package.

    :raises ImportError: with the command that installs it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"this backbone needs {package}: pip install 'covon_avalanche[vision]'"
        ) from error


def _torchvision(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, tuple[str, ...]]:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    if name in ("googlenet", "inception_v3"):
        raise ValueError(f"torchvision's {name!r} has auxiliary outputs, which are not supported")
    options: dict[str, Any] = {"weights": "DEFAULT" if pretrained else None}
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size
    model = get_model(name, **options)
    *_, head = (key for key, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    _replace_head(model, head, num_classes)
    return model, (head,)


def _replace_head(model: nn.Module, name: str, num_classes: int) -> None:
    """Replace the last layer, unless it has ``num_classes`` outputs."""
    old = model.get_submodule(name)
    new: nn.Module
    if isinstance(old, nn.Linear):
        if old.out_features == num_classes:
            return
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    elif isinstance(old, nn.Conv2d):  # SqueezeNet
        if old.out_channels == num_classes:
            return
        new = nn.Conv2d(old.in_channels, num_classes, old.kernel_size)  # type: ignore[arg-type]
        nn.init.normal_(new.weight, std=0.01)
        nn.init.zeros_(new.bias)  # type: ignore[arg-type]
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, new)
    if hasattr(model, "num_classes"):
        setattr(model, "num_classes", num_classes)  # noqa: B010 (an int, not a module)


def _timm(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, tuple[str, ...]]:
    config = timm_config(name)
    if not config.classifier:
        raise ValueError(f"timm's {name!r} has no classifier")
    options = {}
    if image_size is not None and config.fixed_input_size:
        options["img_size"] = image_size
    model = optional_import("timm").create_model(
        name, pretrained=pretrained, num_classes=num_classes, **options
    )
    heads = config.classifier  # several in distilled networks
    return model, (heads,) if isinstance(heads, str) else tuple(heads)


def timm_config(name: str) -> Any:
    """timm's configuration of the weights of ``MODEL`` or ``MODEL.TAG``.

    :raises ValueError: for an unknown name.
    """
    timm = optional_import("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # for an unknown tag
        config = None
    if config is None:
        raise ValueError(f"timm has no weights {name!r}")
    return config


class ImageTower(nn.Module):
    """The image tower of a CLIP with a linear head on its embedding."""

    def __init__(self, visual: nn.Module, features: int, num_classes: int) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images, of shape (batch, classes)."""
        return self.head(self.visual(images))


def create_clip(name: str, pretrained: bool, image_size: int | None) -> nn.Module:
    """A CLIP with both towers.

    :param name: ``MODEL`` or ``MODEL:TAG``.
    """
    open_clip = optional_import("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    if pretrained and (model_name, tag) not in open_clip.list_pretrained():
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    options = {} if image_size is None else {"force_image_size": image_size}
    return open_clip.create_model(model_name, pretrained=tag if pretrained else None, **options)


def clip_features(name: str) -> int:
    """Length of a CLIP's embedding."""
    return optional_import("open_clip").get_model_config(name.partition(":")[0])["embed_dim"]


def _open_clip(
    name: str, num_classes: int, pretrained: bool, image_size: int | None
) -> tuple[nn.Module, tuple[str, ...]]:
    visual: Any = create_clip(name, pretrained, image_size).visual
    return ImageTower(visual, clip_features(name), num_classes), ("head",)


#: By library: from model name, number of classes, whether to download weights, and image size to
#: the network and the names of its heads.
BUILD: dict[str, Callable[[str, int, bool, int | None], tuple[nn.Module, tuple[str, ...]]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "open_clip": _open_clip,
}
