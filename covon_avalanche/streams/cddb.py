"""CDDB: detect generated images, one generator after another.

Li et al., "A Continual Deepfake Detection Benchmark" (WACV 2023).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.checks import check_choice
from covon_avalanche.domain_orders import TRACKS
from covon_avalanche.streams.image_benchmark import (
    ImageOptions,
    check_counts,
    choose_domains,
    data_root,
    image_benchmark,
)
from covon_avalanche.streams.image_files import ImageFiles, image_files

CLASSES = ("real", "fake")
#: Training and test images of the hard track, as counted in PINA's code.
HARD_COUNTS = (16_068, 5_353)
_LABELS = {"0_real": 0, "1_fake": 1}


def CDDB(
    *,
    track: Literal["hard", "easy", "long"] = "hard",
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """CDDB: class 0 is real, class 1 is fake; each domain is one generator.

    Images may be at any depth below ``DOMAIN/{train,val}``; the nearest parent folder named
    ``0_real`` or ``1_fake`` is the label. The test images are those of ``val``, as everywhere in
    the literature. Task identities are not used.

    :param track: ``"hard"`` (5 domains), ``"easy"`` (7) or ``"long"`` (12).
    :param dataset_root: by default ``CDDB`` in Avalanche's data folder.
    :param domains: some of the track's domains, in the order in which they are learned; by default
        all, in the order of ``domain_orders.TRACKS``.

    See :func:`image_benchmark` for the other parameters.
    """
    check_choice("track", track, [*TRACKS])
    root = data_root(dataset_root, "CDDB")
    names = choose_domains(domains, TRACKS[track], f"CDDB ({track})")
    train = {name: _labelled(root / name / "train") for name in names}
    test = {name: _labelled(root / name / "val") for name in names}
    counts = (sum(map(len, train.values())), sum(map(len, test.values())))
    if track == "hard" and len(names) == len(TRACKS["hard"]):
        check_counts("CDDB-Hard (to train, to test)", HARD_COUNTS, counts)
    return image_benchmark(train, test, CLASSES, **options)


def _labelled(folder: Path) -> ImageFiles:
    files, labels = [], []
    for file in image_files(folder):
        names = [p.name for p in file.relative_to(folder).parents if p.name in _LABELS]
        if not names:
            raise ValueError(f"{file} is in no folder named 0_real or 1_fake below {folder}")
        files.append(file)
        labels.append(_LABELS[names[0]])
    return ImageFiles(files, labels)
