"""Domain-incremental benchmarks: one head for all classes, task label 0 everywhere.

Names are loaded on first use, so that reading images does not import Avalanche.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covon_avalanche.streams.cddb import CDDB as CDDB
    from covon_avalanche.streams.core50 import CORe50 as CORe50
    from covon_avalanche.streams.domainnet import DomainNet as DomainNet
    from covon_avalanche.streams.folders import DomainFolders as DomainFolders
    from covon_avalanche.streams.imagenet_r import ImageNetR as ImageNetR
    from covon_avalanche.streams.office_home import OfficeHome as OfficeHome
    from covon_avalanche.streams.pacs import PACS as PACS
    from covon_avalanche.streams.permuted import PermutedDigits as PermutedDigits
    from covon_avalanche.streams.permuted import PermutedMNIST as PermutedMNIST
    from covon_avalanche.streams.transforms import image_transforms as image_transforms

_HOME = {
    "CDDB": "cddb",
    "CORe50": "core50",
    "DomainNet": "domainnet",
    "DomainFolders": "folders",
    "ImageNetR": "imagenet_r",
    "OfficeHome": "office_home",
    "PACS": "pacs",
    "PermutedDigits": "permuted",
    "PermutedMNIST": "permuted",
    "image_transforms": "transforms",
}

__all__ = [
    "CDDB",
    "PACS",
    "CORe50",
    "DomainFolders",
    "DomainNet",
    "ImageNetR",
    "OfficeHome",
    "PermutedDigits",
    "PermutedMNIST",
    "image_transforms",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
