"""CORe50: 50 objects filmed in 11 sessions with different backgrounds and lighting.

Lomonaco and Maltoni, "CORe50: a New Dataset and Benchmark for Continuous Object Recognition"
(CoRL 2017).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.checks import check_choice
from covon_avalanche.domain_orders import NI_ORDERS, check_core50_run, core50_sessions
from covon_avalanche.streams.image_benchmark import (
    ImageOptions,
    check_counts,
    choose_domains,
    data_root,
    image_benchmark,
)
from covon_avalanche.streams.image_files import ImageFiles, image_files

#: Images of the sessions 1 to 11.
COUNTS = (14989, 14986, 14992, 14995, 14966, 14989, 14994, 14984, 14994, 14986, 14991)
CATEGORIES = (
    *("plug_adapter", "mobile_phone", "scissor", "light_bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote_control"),
)
_TEST_SESSIONS = {"official": ("s3", "s7", "s10"), "authors": ("s9", "s10", "s11")}
_NAME = re.compile(r"C_(\d+)_(\d+)_\d+\.png")  # session, object, frame


def CORe50(
    *,
    split: Literal["official", "authors"] = "official",
    run: int = 0,
    labels: Literal["object", "category"] = "object",
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """CORe50, new instances (NI): each session, ``s1`` to ``s11``, is a domain.

    The images are ``s1/o1/C_01_01_000.png`` and so on, in the root or its folder
    ``core50_128x128``. Task identities are not used.

    :param split: ``"official"`` trains on eight sessions and tests on the sessions 3, 7 and 10,
        which are never trained on, so that backward transfer is not defined. ``"authors"`` is
        the split of the CoVON authors' script, which trains on 1 to 8 and tests on 9 to 11; it is
        not comparable with published results.
    :param run: 0 to 9, one of the ten official orders of the training sessions.
    :param labels: 50 objects, or 10 categories of five objects each.
    :param dataset_root: by default ``core50`` in Avalanche's data folder.
    :param domains: some of the training sessions, in the order in which they are learned; by
        default all, in the order of the run, which is the only one allowed with another run than 0.

    See :func:`image_benchmark` for the other parameters.
    """
    check_choice("split", split, [*_TEST_SESSIONS])
    check_choice("labels", labels, ("object", "category"))
    check_choice("run", run, range(len(NI_ORDERS)))
    root = data_root(dataset_root, "core50")
    test = _TEST_SESSIONS[split]
    train = choose_domains(domains, core50_sessions(split, run), f"CORe50 ({split}, run {run})")
    check_core50_run(split, run, train)
    sessions = _sessions(root, labels == "category")
    missing = [name for name in [*train, *test] if name not in sessions]
    if missing:
        raise ValueError(f"{root} has no images of the sessions {missing}")
    for name in [*train, *test]:
        expected = COUNTS[int(name[1:]) - 1]
        check_counts(f"CORe50's session {name}", expected, len(sessions[name]))
    objects = [f"{name}_{k}" for name in CATEGORIES for k in range(1, 6)]
    return image_benchmark(
        {name: sessions[name] for name in train},
        {name: sessions[name] for name in test},
        CATEGORIES if labels == "category" else objects,
        **options,
    )


def _sessions(root: Path, categories: bool) -> dict[str, ImageFiles]:
    """All images by session, with labels from the file names."""
    tree = root / "core50_128x128"
    found: dict[str, tuple[list[Path], list[int]]] = {}
    for file in image_files(tree if tree.is_dir() else root):
        match = _NAME.fullmatch(file.name)
        if match is None or not (1 <= int(match[1]) <= 11 and 1 <= int(match[2]) <= 50):
            raise ValueError(f"{file} is not named C_SESSION_OBJECT_FRAME.png")
        files, labels = found.setdefault(f"s{int(match[1])}", ([], []))
        files.append(file)
        labels.append((int(match[2]) - 1) // 5 if categories else int(match[2]) - 1)
    return {name: ImageFiles(files, labels) for name, (files, labels) in found.items()}
