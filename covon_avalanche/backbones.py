"""Networks with a fresh head for a benchmark's classes, and pretrained weights that are said.

``create_backbone`` builds them over torchvision, timm and open_clip; the last two come with
the extra ``vision``. Weights come from the library, or from a local safetensors or torch file
that is loaded without running code in it; pretrained is never replaced by random in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

#: Short names for what the domain-incremental literature uses, with their exact weight tags.
ALIASES = {
    "vit-b16-in21k-ft-in1k": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit-b16-in21k-ft-in1k-v2": "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit-b16-in1k": "timm/vit_base_patch16_224.augreg_in1k",
    "clip-b16": "open_clip/ViT-B-16-quickgelu:openai",
    "squeezenet": "torchvision/squeezenet1_1",
}


def create_backbone(
    name: str,
    num_classes: int,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """A network whose last layer is new, for ``num_classes`` classes.

    :param name: ``LIBRARY/MODEL`` with torchvision, timm (``MODEL.TAG`` names the weights) or
        open_clip (``MODEL:TAG``, the image tower with a linear head), or one of ``ALIASES``.
    :param num_classes: outputs of the new layer.
    :param weights: ``None`` for random ones, ``"default"`` to let the library download those of
        the name, or the path of a ``.safetensors`` or ``.pth`` file. A layer for as many
        classes in it is taken over, one for others is replaced.
    :param image_size: height and width of the input, for networks built for one size.
    :raises ValueError: for an unknown name, or weights that do not fit, with their keys.
    :raises ImportError: where the library is not installed.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be >= 1, got {num_classes}")
    library, _, model_name = ALIASES.get(name, name).partition("/")
    if library not in _BUILD or not model_name:
        raise ValueError(
            f"a backbone is named LIBRARY/MODEL with one of {sorted(_BUILD)}, or is one of "
            f"{sorted(ALIASES)}; got {name!r}"
        )
    file = None if weights in (None, "default") else _read(Path(weights))
    model, head = _BUILD[library](model_name, weights == "default", image_size)
    if file is not None:
        _load(model, head, file, num_classes, str(weights))
    if _outputs(model.get_submodule(head)) != num_classes:
        _replace(model, head, num_classes)
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training parameters by the patterns of their names (``*`` and ``?``, as for files).

    :return: the names of the frozen parameters.
    :raises ValueError: for a pattern that fits no name.
    """
    names = dict(model.named_parameters())
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no parameter's name fits {pattern!r}; names are {_some(names)}")
        chosen += found
    for name in chosen:
        names[name].requires_grad_(False)
    return list(dict.fromkeys(chosen))


def parameter_groups(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Groups for an optimizer, with parameters by name; frozen ones are left out.

    :param settings: from a pattern of names to the group's options; a parameter goes to the
        first that fits, those that fit none share a group with the optimizer's own options.
    :raises ValueError: for a pattern that fits no trained parameter.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {pattern: [] for pattern in settings}
    rest: list[tuple[str, Tensor]] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            fitting = (members for key, members in groups.items() if fnmatchcase(name, key))
            next(fitting, rest).append((name, p))
    for pattern, members in groups.items():
        if not members:
            raise ValueError(f"no trained parameter is left for the pattern {pattern!r}")
    found = [{"params": groups[pattern], **options} for pattern, options in settings.items()]
    return [*found, {"params": rest}] if rest else found


# By library ----------------------------------------------------------------------------


def _torchvision(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise ValueError(f"torchvision has no model {name!r}")
    options: dict[str, Any] = {"weights": "DEFAULT" if pretrained else None}
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size
    model = get_model(name, **options)
    heads = [key for key, layer in model.named_modules() if _outputs(layer) is not None]
    return model, heads[-1]


def _timm(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    timm = _needs("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}")
    options = {} if image_size is None else {"img_size": image_size}
    model = timm.create_model(name, pretrained=pretrained, **options)
    return model, str(model.pretrained_cfg["classifier"])


class _ImageTower(nn.Module):
    """The image side of a CLIP with a linear head on its embedding."""

    def __init__(self, visual: nn.Module, features: int) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(features, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.visual(images))


def _open_clip(name: str, pretrained: bool, image_size: int | None) -> tuple[nn.Module, str]:
    open_clip = _needs("open_clip")
    model_name, _, tag = name.partition(":")
    if model_name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {model_name!r}")
    if pretrained and (model_name, tag) not in open_clip.list_pretrained():
        raise ValueError(f"open_clip has no weights {tag!r} for {model_name!r}")
    options = {} if image_size is None else {"force_image_size": image_size}
    clip = open_clip.create_model(model_name, pretrained=tag if pretrained else None, **options)
    return _ImageTower(clip.visual, clip.visual.output_dim), "head"


_BUILD: dict[str, Callable[[str, bool, int | None], tuple[nn.Module, str]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "open_clip": _open_clip,
}


def _needs(package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"this backbone needs {package}: pip install 'covon_avalanche[vision]'"
        ) from error


# Heads and weights ---------------------------------------------------------------------


def _outputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels if isinstance(layer, nn.Conv2d) else None


def _replace(model: nn.Module, head: str, num_classes: int) -> None:
    old = model.get_submodule(head)
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    elif isinstance(old, nn.Conv2d):  # SqueezeNet's
        new = nn.Conv2d(old.in_channels, num_classes, old.kernel_size)  # type: ignore[arg-type]
        nn.init.normal_(new.weight, std=0.01)
        nn.init.zeros_(new.bias)  # type: ignore[arg-type]
    else:
        raise ValueError(f"the last layer {head!r} is a {type(old).__name__}, which is unknown")
    parent, _, key = head.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, key, new)
    if hasattr(model, "num_classes"):
        setattr(model, "num_classes", num_classes)  # noqa: B010 (no tensor, no module)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    except Exception as error:  # torch's own, zip's and pickle's errors alike
        raise ValueError(f"{path} holds no weights that can be loaded safely: {error}") from error
    for key in ("state_dict", "model"):  # as training scripts write them
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not (isinstance(content, dict) and all(isinstance(v, Tensor) for v in content.values())):
        raise ValueError(f"{path} holds no tensors by name")
    return content


def _load(
    model: nn.Module, head: str, file: dict[str, Tensor], num_classes: int, path: str
) -> None:
    """Load all but the head; that, too, where it is for as many classes."""
    heads = {key for key in file if key.startswith(f"{head}.")}
    if any(file[key].shape[0] == num_classes for key in heads):
        _replace(model, head, num_classes)
    else:
        file = {key: value for key, value in file.items() if key not in heads}
    own = model.state_dict()
    wanted = {key for key in own if key in file or not key.startswith(f"{head}.")}
    missing, unknown = sorted(wanted - file.keys()), sorted(file.keys() - own.keys())
    misshapen = [
        f"{key} {tuple(file[key].shape)} instead of {tuple(own[key].shape)}"
        for key in sorted(wanted & file.keys())
        if file[key].shape != own[key].shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
    found = "; ".join(f"{what}: {_some(keys)}" for what, keys in faults.items() if keys)
    if found:
        raise ValueError(f"{path} does not fit the network; {found}")
    model.load_state_dict(file, strict=False)


def _some(names: Sequence[str] | Mapping[str, Any]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more
