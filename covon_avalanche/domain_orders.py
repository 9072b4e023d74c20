"""Domain orders and numbers of images of published protocols; this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

#: By stream, images of each domain, for training and testing or together, in the default order.
COUNTS: dict[str, dict[str, int | tuple[int, int]]] = {
    "PACS": {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
    "DomainNet": {  # the cleaned version
        "clipart": (33_525, 14_604),
        "infograph": (36_023, 15_582),
        "painting": (50_416, 21_850),
        "quickdraw": (120_750, 51_750),
        "real": (120_906, 52_041),
        "sketch": (48_212, 20_916),
    },
    "OfficeHome": {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    "ImageNetR": {
        "art": 1528,
        "cartoon": 3726,
        "deviantart": 2163,
        "embroidery": 722,
        "graffiti": 941,
        "graphic": 644,
        "misc": 5673,
        "origami": 550,
        "painting": 2835,
        "sculpture": 1196,
        "sketch": 4634,
        "sticker": 508,
        "tattoo": 1947,
        "toy": 1511,
        "videogame": 1422,
    },
}
PACS, DOMAINNET = tuple(COUNTS["PACS"]), tuple(COUNTS["DomainNet"])
OFFICE_HOME, IMAGENET_R = tuple(COUNTS["OfficeHome"]), tuple(COUNTS["ImageNetR"])
#: Of DUCT's released configuration (the default order) and of its log of January 2026.
OFFICE_HOME_DUCT = (OFFICE_HOME, ("Product", "Clipart", "Real World", "Art"))
_EASY = ("gaugan", "biggan", "cyclegan", "imle", "deepfake", "crn", "wild")
#: Generators of CDDB's tracks.
TRACKS: dict[str, tuple[str, ...]] = {
    "hard": ("gaugan", "biggan", "wild", "whichfaceisreal", "san"),
    "easy": _EASY,
    "long": (*_EASY, "glow", "stargan_gf", "stylegan", "whichfaceisreal", "san"),
}
#: Training sessions of CORe50's ten official NI runs.
NI_ORDERS = (
    (11, 4, 2, 9, 1, 6, 5, 8),
    (2, 9, 1, 8, 4, 5, 11, 6),
    (8, 2, 6, 5, 4, 1, 9, 11),
    (1, 9, 2, 8, 6, 11, 5, 4),
    (5, 1, 4, 8, 11, 9, 6, 2),
    (4, 5, 11, 8, 2, 1, 9, 6),
    (8, 11, 1, 9, 2, 4, 6, 5),
    (6, 2, 5, 8, 11, 1, 9, 4),
    (4, 5, 6, 11, 2, 1, 9, 8),
    (1, 8, 9, 4, 6, 2, 11, 5),
)


def core50_sessions(split: str, run: int) -> list[str]:
    """CORe50's training sessions in order; the CoVON authors' split has one order only."""
    numbers = NI_ORDERS[run] if split == "official" else range(1, 9)
    return [f"s{k}" for k in numbers]


def check_core50_run(split: str, run: int, domains: Sequence[str]) -> None:
    """Check that ``run`` and ``domains`` agree; with run 0, the default, any order is allowed.

    :raises ValueError: naming the run and its order.
    """
    if run == 0:
        return
    if split != "official":
        raise ValueError(f"run is for the official split, got run {run} with the split {split!r}")
    order = core50_sessions(split, run)
    if list(domains) != [name for name in order if name in domains]:
        raise ValueError(f"domains must be in the order of run {run}, {order}, got {list(domains)}")
