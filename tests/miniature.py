"""Miniature copies of image data sets, with the real layouts, names and traps.

The colour of a made image tells its class and domain, so that labels can be checked without
trusting paths.
"""

from __future__ import annotations

import csv
import itertools
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

from covon_avalanche.streams.domainnet import domainnet_classes
from covon_avalanche.streams.pacs import CLASSES as CLASSES_OF_PACS


def paint(file: Path, label: int, domain: int = 0) -> str:
    """A 4 x 4 PNG, whatever the file's suffix; returns its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as handle:
        Image.new("RGB", (4, 4), (label // 256, label % 256, domain)).save(handle, "PNG")
    return str(file)


# DomainNet -----------------------------------------------------------------------------

CLASSES = domainnet_classes()
GAPS = {("painting", "train"): "t-shirt", ("painting", "test"): "syringe"}
CODES = {"clipart": 1, "painting": 2}


def domainnet(root: Path, layout: str) -> Path:
    for domain, part in itertools.product(CODES, ("train", "test")):
        lines = []
        for label, name in enumerate(CLASSES):
            if GAPS.get((domain, part)) == name:
                continue
            middle = (domain, part, name) if layout == "folders" else (domain, name)
            file = root.joinpath(*middle, f"{domain}_{part}_{label}.jpg")
            paint(file, label, CODES[domain])
            lines.append(f"{file.relative_to(root)} {label}\n")
        if layout == "lists":
            (root / f"{domain}_{part}.txt").write_text("".join(lines))
    return root


# CDDB ----------------------------------------------------------------------------------


def cddb(root: Path) -> dict[str, int]:
    """Two plain domains and one with object classes between; decoys in ``test``."""
    codes = {"gaugan": 1, "biggan": 2, "cyclegan": 3}
    for (domain, code), part in itertools.product(codes.items(), ("train", "val", "test")):
        for label, name in enumerate(("0_real", "1_fake")):
            between = ("horse",) if domain == "cyclegan" else ()
            for i in range(3):
                wrong = 9 if part == "test" else label
                paint(root.joinpath(domain, part, *between, name, f"{i}.png"), wrong, code)
    return codes


# CORe50 --------------------------------------------------------------------------------


def core50(root: Path, layout: str) -> dict[str, int]:
    """Two frames of the objects 1, 2, 7 and 50 in all sessions."""
    codes = {f"s{k}": k for k in range(1, 12)}
    paths, pixels = [], []
    for (session, code), number, frame in itertools.product(codes.items(), (1, 2, 7, 50), range(2)):
        path = f"{session}/o{number}/C_{code:02d}_{number:02d}_{frame:03d}.png"
        if layout == "tree":
            paint(root / "core50_128x128" / path, number - 1, code)
        paths.append(path)
        pixels.append(np.broadcast_to(np.uint8([0, number - 1, code]), (4, 4, 3)))
    if layout == "archive":
        np.savez(root / "core50_imgs.npz", x=np.stack(pixels))
        (root / "paths.pkl").write_bytes(pickle.dumps(paths))
    return codes


# PACS ----------------------------------------------------------------------------------


def pacs(root: Path) -> Path:
    """Ten images of each class in two domains."""
    for domain, code in (("photo", 1), ("sketch", 2)):
        for label, name in enumerate(CLASSES_OF_PACS):
            for i in range(10):
                paint(root / domain / name / f"{i}.jpg", label, code)
    return root


# Anyone's folders ----------------------------------------------------------------------

OWN = {"day": ("cat", "dog"), "night": ("dog", "fox")}
OWN_CLASSES = ["cat", "dog", "fox"]
OWN_CODES = {"day": 1, "night": 2}


def own(root: Path, layout: str) -> Path:
    rows = []
    for (domain, names), i in itertools.product(OWN.items(), range(10)):
        for name in names:
            part = "test" if i < 2 else "train"
            middle = (domain, part, name) if layout == "split" else (domain, name)
            file = root.joinpath(*middle, f"{i}.png")
            paint(file, OWN_CLASSES.index(name), OWN_CODES[domain])
            rows.append((file.relative_to(root), domain, name, part))
    if layout != "csv":
        return root
    with (root / "table.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([("file", "domain", "label", "split"), *rows])
    return root / "table.csv"
