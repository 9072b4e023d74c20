"""Networks with a fresh head for a benchmark's classes, and pretrained weights that are said.

``create_backbone`` builds them over torchvision, timm and open_clip; the last two come with
the extra ``vision``. Weights come from the library, or from a local safetensors or torch file
that is loaded without running code in it; pretrained is never replaced by random in silence.
"""

from covon_avalanche.backbones.create import create_backbone
from covon_avalanche.backbones.groups import freeze, parameter_groups
from covon_avalanche.backbones.libraries import ALIASES
from covon_avalanche.backbones.normalisation import normalisation

__all__ = ["ALIASES", "create_backbone", "freeze", "normalisation", "parameter_groups"]
