"""Load weights from files without running code; report keys that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file, by name.

    :raises ValueError: if the file does not exist or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    except Exception as error:  # of torch, zipfile or pickle
        raise ValueError(f"{path} holds no weights that can be loaded safely: {error}") from error
    for key in ("state_dict", "model"):  # as saved by training scripts
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not (isinstance(content, dict) and all(isinstance(v, Tensor) for v in content.values())):
        raise ValueError(f"{path} holds no tensors by name")
    return content


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str, *, optional: tuple[str, ...] = ()
) -> None:
    """Load tensors by name into a network; all must fit.

    :param path: their file, for error messages.
    :param optional: prefixes of the names that may be missing.
    :raises ValueError: naming tensors that are missing, unknown or of another shape.
    """
    own = model.state_dict()
    wanted = {key for key in own if key in tensors or not key.startswith(optional)}
    missing, unknown = sorted(wanted - tensors.keys()), sorted(tensors.keys() - own.keys())
    reshaped = [
        f"{key} {tuple(tensors[key].shape)} instead of {tuple(own[key].shape)}"
        for key in sorted(wanted & tensors.keys())
        if tensors[key].shape != own[key].shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": reshaped}
    found = "; ".join(f"{what}: {abbreviated(keys)}" for what, keys in faults.items() if keys)
    if found:
        raise ValueError(f"{path} does not fit the network; {found}")
    model.load_state_dict(tensors, strict=False)


def abbreviated(names: Sequence[str] | Mapping[str, Any]) -> str:
    """The first six names."""
    listed = list(names)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more
