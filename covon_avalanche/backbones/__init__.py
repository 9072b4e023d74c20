"""Pretrained networks of torchvision, timm and open_clip with a new head for a benchmark's classes.

timm and open_clip need the extra ``vision``. Weights come from the library, or from a local
safetensors or torch file, which is loaded without running code. Missing or unsuitable weights are
an error, never replaced by random ones.
"""

from covon_avalanche.backbones.create import create_backbone
from covon_avalanche.backbones.libraries import ALIASES, normalisation

__all__ = ["ALIASES", "create_backbone", "normalisation"]
