"""Domain orders of published protocols; this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

PACS = ("photo", "art_painting", "cartoon", "sketch")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
OFFICE_HOME = ("Art", "Clipart", "Product", "Real World")
#: Of DUCT's released configuration (the default order) and of its log of January 2026.
OFFICE_HOME_DUCT = (OFFICE_HOME, ("Product", "Clipart", "Real World", "Art"))
IMAGENET_R = (
    *("art", "cartoon", "deviantart", "embroidery", "graffiti", "graphic", "misc", "origami"),
    *("painting", "sculpture", "sketch", "sticker", "tattoo", "toy", "videogame"),
)
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
