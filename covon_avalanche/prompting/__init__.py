"""Prompts and adapters on frozen vision transformers.

Every method works in a plain PyTorch loop, see :class:`PromptModel`; in Avalanche
:class:`covon_avalanche.plugins.PromptPlugin` calls it. Nothing here imports Avalanche.
"""

from covon_avalanche.prompting.coda_prompt import CODAPrompt
from covon_avalanche.prompting.domain_prompts import DomainPrompts
from covon_avalanche.prompting.dualprompt import DualPrompt
from covon_avalanche.prompting.hedp import HEDP
from covon_avalanche.prompting.l2p import L2P
from covon_avalanche.prompting.pina import PINA
from covon_avalanche.prompting.prompt_model import PromptModel
from covon_avalanche.prompting.prompted_vit import PromptedViT, take_classifier
from covon_avalanche.prompting.s_liprompts import DomainMixture, SLiPrompts, SLiPromptsMixture
from covon_avalanche.prompting.s_prompts import SPrompts
from covon_avalanche.prompting.selectors import DomainSelector, MixtureSelector, NearestCentre
from covon_avalanche.prompting.soyo import SOYO
from covon_avalanche.prompting.tuned_vit import AdaptFormer, CosineClassifier, TunedViT

__all__ = [
    "HEDP",
    "L2P",
    "PINA",
    "SOYO",
    "AdaptFormer",
    "CODAPrompt",
    "CosineClassifier",
    "DomainMixture",
    "DomainPrompts",
    "DomainSelector",
    "DualPrompt",
    "MixtureSelector",
    "NearestCentre",
    "PromptModel",
    "PromptedViT",
    "SLiPrompts",
    "SLiPromptsMixture",
    "SPrompts",
    "TunedViT",
    "take_classifier",
]
