"""CORe50: 50 objects filmed in 11 sessions, each another background and light.

Lomonaco and Maltoni, "CORe50: a New Dataset and Benchmark for Continuous Object Recognition"
(CoRL 2017).
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from avalanche.benchmarks import CLScenario
from avalanche.benchmarks.datasets import default_dataset_location
from filelock import FileLock

from covon_avalanche.atomic_write import replaced_when_whole
from covon_avalanche.disk_space import require_space
from covon_avalanche.domain_orders import NI_ORDERS, check_core50_run, core50_sessions
from covon_avalanche.streams.images import (
    choose_domains,
    image_benchmark,
    image_files,
)
from covon_avalanche.streams.sources import ImageFiles, ImageRows, Images
from covon_avalanche.streams.transforms import Transform

#: Images of sessions 1 to 11.
COUNTS = (14989, 14986, 14992, 14995, 14966, 14989, 14994, 14984, 14994, 14986, 14991)
CATEGORIES = (
    *("plug_adapter", "mobile_phone", "scissor", "light_bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote_control"),
)
_TESTED = {"official": ("s3", "s7", "s10"), "authors": ("s9", "s10", "s11")}
_NAME = re.compile(r"C_(\d+)_(\d+)_\d+\.png$")  # session and object


def CORe50(
    *,
    split: Literal["official", "authors"] = "official",
    run: int = 0,
    labels: Literal["object", "category"] = "object",
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    validation_size: float = 0,
    limit: int | None = None,
    seed: int = 0,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 256,
    skip_broken: bool = False,
) -> CLScenario:
    """CORe50, new instances: each session, ``s1`` to ``s11``, is a domain.

    Two layouts are recognised: the tree ``s1/o1/C_01_01_000.png`` (in the root or its folder
    ``core50_128x128``), and ``core50_imgs.npz`` with ``paths.pkl``, whose array is unpacked
    once, to ``core50_imgs.npy`` beside it; it needs no ``cache``. Task identities are not used.

    :param split: ``"official"`` trains on eight sessions and tests on the sessions 3, 7 and 10,
        which are never trained on: there is no backward transfer. ``"authors"`` is that of the
        CoVON authors' script, 1 to 8 and 9 to 11, not comparable with published results.
    :param run: 0 to 9, one of the ten official orders of the training sessions.
    :param labels: 50 objects or 10 categories of five objects each.
    :param dataset_root: by default ``core50`` in Avalanche's data folder.
    :param domains: some of the training sessions, in the order to learn them; with another run
        than 0 that must be the run's.

    See :func:`image_benchmark` for the other parameters.
    """
    if split not in _TESTED:
        raise ValueError(f"split must be one of {list(_TESTED)}, got {split!r}")
    if labels not in ("object", "category"):
        raise ValueError(f"labels must be 'object' or 'category', got {labels!r}")
    if not 0 <= run < len(NI_ORDERS):
        raise ValueError(f"run must be in 0 to {len(NI_ORDERS) - 1}, got {run}")
    root = Path(default_dataset_location("core50") if dataset_root is None else dataset_root)
    tests = _TESTED[split]
    order = core50_sessions(split, run)
    wanted = choose_domains(domains, order, f"CORe50 ({split}, run {run})")
    check_core50_run(split, run, wanted)
    sessions = _sessions(root, labels == "category")
    missing = [name for name in [*wanted, *tests] if name not in sessions]
    if missing:
        raise ValueError(f"{root} has no images of the sessions {missing}")
    for name in [*wanted, *tests]:
        expected = COUNTS[int(name[1:]) - 1]
        if len(sessions[name]) != expected:
            warnings.warn(
                f"CORe50's session {name} should have {expected} images, found "
                f"{len(sessions[name])}",
                stacklevel=2,
            )
    objects = [f"{name}_{k}" for name in CATEGORIES for k in range(1, 6)]
    return image_benchmark(
        {name: sessions[name] for name in wanted},
        {name: sessions[name] for name in tests},
        CATEGORIES if labels == "category" else objects,
        validation_size=validation_size,
        limit=limit,
        seed=seed,
        train_transform=train_transform,
        eval_transform=eval_transform,
        cache=cache,
        cache_size=cache_size,
        skip_broken=skip_broken,
    )


def _sessions(root: Path, categories: bool) -> Mapping[str, Images]:
    """All images by session."""
    archive, tree = root / "core50_imgs.npz", root / "core50_128x128"
    if (root / "core50_imgs.npy").is_file() or archive.is_file():
        array = np.load(_unpacked(archive), mmap_mode="r")
        paths = _paths(root / "paths.pkl")
        if len(paths) != len(array):
            raise ValueError(f"{root / 'paths.pkl'} has {len(paths)} paths for {len(array)} images")
        found = _by_session(paths, categories)
        return {name: ImageRows(array, *columns) for name, columns in found.items()}
    files = image_files(tree if tree.is_dir() else root)
    found = _by_session([str(file) for file in files], categories)
    return {
        name: ImageFiles([files[i] for i in rows], labels) for name, (rows, labels) in found.items()
    }


def _by_session(paths: Sequence[str], categories: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Rows and labels by session, from the file names alone."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for row, path in enumerate(paths):
        match = _NAME.search(path)
        if match is None or not (1 <= int(match[1]) <= 11 and 1 <= int(match[2]) <= 50):
            raise ValueError(f"{path} is not named C_SESSION_OBJECT_FRAME.png")
        rows, labels = found.setdefault(f"s{int(match[1])}", ([], []))
        rows.append(row)
        labels.append((int(match[2]) - 1) // 5 if categories else int(match[2]) - 1)
    return found


def _unpacked(archive: Path) -> Path:
    """The archive's array as a file of its own, which can be memory-mapped.

    One process unpacks it, the others wait.
    """
    target = archive.with_suffix(".npy")
    if not target.is_file():
        with FileLock(archive.with_name(f".{archive.stem}.lock")):
            if not target.is_file():  # another process may have made it
                _unpack(archive, target)
    return target


def _unpack(archive: Path, target: Path) -> None:
    for left_over in target.parent.glob(f".{target.name}.*.part"):
        left_over.unlink()
    try:
        with zipfile.ZipFile(archive) as packed:
            require_space(target.parent, packed.getinfo("x.npy").file_size)
            with (
                replaced_when_whole(target) as part,
                packed.open("x.npy") as source,
                part.open("wb") as file,
            ):
                shutil.copyfileobj(source, file, 2**20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{archive} is damaged, or has no array 'x': {error}") from error


class _NoObjects(pickle.Unpickler):
    """Reads lists and strings; refuses whatever would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _paths(file: Path) -> list[str]:
    try:
        paths = _NoObjects(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # a pickle may be broken in many ways
        raise ValueError(f"{file} is not a pickled list of paths: {error}") from error
    if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
        raise ValueError(f"{file} is not a pickled list of paths")
    return paths
