"""Features of a frozen network."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import SwinTransformer

from covon_avalanche.checks import check_choice
from covon_avalanche.last_layer import last_layer
from covon_avalanche.module_hooks import module_hooks

_CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class FeatureExtractor(nn.Module):
    """The features of a network's last layer, or of several blocks, concatenated.

    The network is frozen and stays in evaluation mode.

    Using several blocks is the idea of LayUP (Ahrens et al., "Read Between the Layers: Leveraging
    Multi-Layer Representations for Rehearsal-Free Continual Learning", TMLR 2024).

    :param network: any network; without ``blocks`` one with a classifier, its last linear or
        convolutional layer, which is not used.
    :param blocks: ``None`` for the input of the last layer; ``k`` for the outputs of the
        last ``k`` blocks, see :func:`blocks_of`.
    :param pool: features of a map of shape (batch, channels, height, width): its ``"mean"`` over
        positions, or ``"mean+max"``, both. Of tokens, shape (batch, tokens, width), the class
        token is taken, or their mean if the network has none.
    :raises ValueError: if the network has fewer blocks, or no last layer.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: int | None = None,
        pool: Literal["mean", "mean+max"] = "mean",
    ) -> None:
        super().__init__()
        check_choice("pool", pool, ("mean", "mean+max"))
        self.network = network.requires_grad_(False).eval()
        self.pool = pool
        if blocks is None:
            self._layers = [last_layer(network)]
        else:
            found = blocks_of(network)
            if not 1 <= blocks <= len(found):
                raise ValueError(
                    f"blocks must be between 1 and {len(found)}, the number of blocks of "
                    f"{type(network).__name__}, got {blocks}"
                )
            self._layers = found[-blocks:]
        self._of_inputs = blocks is None

    def train(self, mode: bool = True) -> FeatureExtractor:
        """Stay in evaluation mode: batch norm and dropout must not change the features."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Features of shape (batch, width), float32."""
        found: dict[nn.Module, Tensor] = {}

        def keep(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            x = next(iter((*args, *kwargs.values()))) if self._of_inputs else output
            x = x[0] if isinstance(x, tuple) else x  # of transformers, the hidden states first
            found[layer] = self._pooled(x.float()).clone()  # later layers may change x in place

        layers = [self.network.get_submodule(name) for name in self._layers]
        with module_hooks() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_hook(keep, with_kwargs=True))
            self.network(x)
        return torch.cat([found[layer] for layer in layers], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            names = (name for name, _ in self.network.named_parameters())
            has_class_token = any(n.endswith(_CLASS_TOKENS) for n in names)
            return x[:, 0] if has_class_token else x.mean(1)
        if x.dim() == 4:
            maps = (x.permute(0, 3, 1, 2) if self._channels_last() else x).flatten(2)
            both = self.pool == "mean+max"
            return torch.cat([maps.mean(2), maps.amax(2)], 1) if both else maps.mean(2)
        return x

    def _channels_last(self) -> bool:
        """Whether the network, or the one in its wrapper that has the layers, says so."""
        name = self._layers[0]
        parents = [name[:i] for i, letter in enumerate(name) if letter == "."]
        owners = [self.network.get_submodule(parent) for parent in ("", *parents)]
        of_timm = [o for own in owners for o in (own, getattr(own, "patch_embed", None))]  # SAM's
        formats = [getattr(owner, "output_fmt", None) for owner in of_timm]
        return "NHWC" in formats or any(isinstance(owner, SwinTransformer) for owner in owners)


def blocks_of(network: nn.Module) -> list[str]:
    """Names of a network's blocks in order of definition: the outermost submodules with children
    whose class occurs at least twice, such as a ViT's transformer blocks, SqueezeNet's Fire modules
    or the residual blocks of a ResNet."""
    candidates = {
        name: module
        for name, module in network.named_modules()
        if name and next(module.children(), None) and not isinstance(module, _CONTAINERS)
    }
    kinds = Counter(type(module) for module in candidates.values())
    names: list[str] = []
    for name, module in candidates.items():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if kinds[type(module)] > 1 and not inside:
            names.append(name)
    return names
