"""Miniature copies of image data sets, whose colours tell class and domain."""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from covon_avalanche.streams.domainnet import CLASSES
from covon_avalanche.streams.imagenet_r import CLASSES as CLASSES_OF_IMAGENET_R
from covon_avalanche.streams.office_home import CLASSES as CLASSES_OF_OFFICE_HOME
from covon_avalanche.streams.pacs import CLASSES as CLASSES_OF_PACS


@cache
def png(colour: tuple[int, int, int]) -> bytes:
    """4 x 4 pixels of one colour."""
    Image.new("RGB", (4, 4), colour).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def paint(file: Path, label: int, domain: int = 0) -> str:
    """A PNG, whatever the file's suffix; returns its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png((label // 256, label % 256, domain)))
    return str(file)


# DomainNet -----------------------------------------------------------------------------

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


def core50(root: Path) -> dict[str, int]:
    """Two frames of the objects 1, 2, 7 and 50 in all sessions."""
    codes = {f"s{k}": k for k in range(1, 12)}
    for (session, code), number, frame in itertools.product(codes.items(), (1, 2, 7, 50), range(2)):
        name = f"C_{code:02d}_{number:02d}_{frame:03d}.png"
        paint(root / "core50_128x128" / session / f"o{number}" / name, number - 1, code)
    return codes


# PACS and Office-Home ------------------------------------------------------------------


def ten_of_each_class(root: Path, codes: dict[str, int], classes: tuple[str, ...]) -> Path:
    for (domain, code), (label, name) in itertools.product(codes.items(), enumerate(classes)):
        for i in range(10):
            paint(root / domain / name / f"{i}.jpg", label, code)
    return root


def pacs(root: Path) -> Path:
    return ten_of_each_class(root, {"photo": 1, "sketch": 2}, CLASSES_OF_PACS)


OFFICE_HOME_CODES = {"Art": 1, "Real World": 2}


def office_home(root: Path, real_world: str = "Real World") -> Path:
    """With another name of the second folder, if given."""
    return ten_of_each_class(root, {"Art": 1, real_world: 2}, CLASSES_OF_OFFICE_HOME)


# ImageNet-R ----------------------------------------------------------------------------

IMAGENET_R_CODES = {"art": 1, "sketch": 2, "videogame": 3}


def imagenet_r(root: Path) -> Path:
    """Ten images of each of four classes in the first two domains, one class in the third."""
    for domain, code in IMAGENET_R_CODES.items():
        for label in (0, 1, 7, 199) if code < 3 else (7,):
            for i in range(10):
                paint(root / CLASSES_OF_IMAGENET_R[label] / f"{domain}_{i}.jpg", label, code)
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


def picture(file: Path, width: int, height: int, seed: int, **options) -> Path:
    """A smooth random image."""
    file.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, **options)
    return file


# Reading any of them -------------------------------------------------------------------


def as_is(image: Image.Image) -> torch.Tensor:
    return torch.tensor(np.asarray(image)[0, 0].astype(np.int64))


def open_stream(stream, root, **options):
    """Without transforms and without the warnings about counts of the real data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"train_transform": as_is, "eval_transform": as_is, **options}
        return stream(dataset_root=root, **options)


def seen(experience) -> list[tuple[int, int, int]]:
    """Label, class by colour, domain by colour."""
    rows = (experience.dataset[i] for i in range(len(experience.dataset)))
    return [(int(y), int(x[0]) * 256 + int(x[1]), int(x[2])) for x, y, *_ in rows]


def check_labels(benchmark, domain_codes):
    """All labels are those of the colours, in every stream."""
    for stream in benchmark.streams.values():
        for experience in stream:
            rows = seen(experience)
            assert rows
            assert all(label == painted for label, painted, _ in rows)
            assert {code for *_, code in rows} == {domain_codes[experience.domain]}
            assert set(experience.dataset.targets_task_labels) == {0}
