"""Domain-incremental benchmarks: one head for all classes, task label 0 everywhere."""

from covon_avalanche.streams.cddb import CDDB
from covon_avalanche.streams.core50 import CORe50
from covon_avalanche.streams.domainnet import DomainNet
from covon_avalanche.streams.folders import DomainFolders
from covon_avalanche.streams.imagenet_r import ImageNetR
from covon_avalanche.streams.office_home import OfficeHome
from covon_avalanche.streams.pacs import PACS
from covon_avalanche.streams.permuted import PermutedDigits, PermutedMNIST
from covon_avalanche.streams.transforms import image_transforms

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
