"""CORe50: 50 objects filmed in 11 sessions with different backgrounds and lighting.

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from avalanche.benchmarks import CLScenario
from avalanche.benchmarks.datasets import default_dataset_location
from filelock import FileLock
from typing_extensions import Unpack

from covon_avalanche.atomic_write import atomic_replace
from covon_avalanche.domain_orders import NI_ORDERS, check_core50_run, core50_sessions
from covon_avalanche.streams.image_benchmark import ImageOptions, choose_domains, image_benchmark
from covon_avalanche.streams.image_datasets import ImageArray, ImageFiles, Images
from covon_avalanche.streams.image_files import image_files
from covon_avalanche.streams.transforms import Transform

#: Images of the sessions 1 to 11.
COUNTS = (14989, 14986, 14992, 14995, 14966, 14989, 14994, 14984, 14994, 14986, 14991)
CATEGORIES = (
    *("plug_adapter", "mobile_phone", "scissor", "light_bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote_control"),
)
_TEST_SESSIONS = {"official": ("s3", "s7", "s10"), "authors": ("s9", "s10", "s11")}
_NAME = re.compile(r"C_(\d+)_(\d+)_\d+\.png$")  # session, object, frame


def CORe50(
    *,
    split: Literal["official", "authors"] = "official",
    run: int = 0,
    labels: Literal["object", "category"] = "object",
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """CORe50, new instances (NI): each session, ``s1`` to ``s11``, is a domain.

    Two layouts are recognised: the tree ``s1/o1/C_01_01_000.png`` (in the root or its folder
    ``core50_128x128``), and ``core50_imgs.npz`` with ``paths.pkl``. The array of the latter is
    unpacked once, to ``core50_imgs.npy``, and needs no ``cache``. Task identities are not used.

    :param split: ``"official"`` trains on eight sessions and tests on the sessions 3, 7 and 10,
        which are never trained on, so that backward transfer is not defined. ``"authors"`` is
        the split of the CoVON authors' script, which trains on 1 to 8 and tests on 9 to 11; it is
        not comparable with published results.
    :param run: 0 to 9, one of the ten official orders of the training sessions.
    :param labels: 50 objects, or 10 categories of five objects each.
    :param dataset_root: by default ``core50`` in Avalanche's data folder.
    :param domains: some of the training sessions, in the order in which they are learned; with
        another run than 0 it must be the order of the run.

    See :func:`image_benchmark` for the other parameters.
    """
    if split not in _TEST_SESSIONS:
        raise ValueError(f"split must be one of {list(_TEST_SESSIONS)}, got {split!r}")
    if labels not in ("object", "category"):
        raise ValueError(f"labels must be 'object' or 'category', got {labels!r}")
    if not 0 <= run < len(NI_ORDERS):
        raise ValueError(f"run must be in 0 to {len(NI_ORDERS) - 1}, got {run}")
    root = Path(default_dataset_location("core50") if dataset_root is None else dataset_root)
    test = _TEST_SESSIONS[split]
    train = choose_domains(domains, core50_sessions(split, run), f"CORe50 ({split}, run {run})")
    check_core50_run(split, run, train)
    sessions = _sessions(root, labels == "category")
    missing = [name for name in [*train, *test] if name not in sessions]
    if missing:
        raise ValueError(f"{root} has no images of the sessions {missing}")
    for name in [*train, *test]:
        expected, found = COUNTS[int(name[1:]) - 1], len(sessions[name])
        if found != expected:
            warnings.warn(
                f"CORe50's session {name} should have {expected} images, found {found}",
                stacklevel=2,
            )
    objects = [f"{name}_{k}" for name in CATEGORIES for k in range(1, 6)]
    return image_benchmark(
        {name: sessions[name] for name in train},
        {name: sessions[name] for name in test},
        CATEGORIES if labels == "category" else objects,
        train_transform=train_transform,
        eval_transform=eval_transform,
        **options,
    )


def _sessions(root: Path, categories: bool) -> Mapping[str, Images]:
    """All images by session."""
    archive, tree = root / "core50_imgs.npz", root / "core50_128x128"
    array = archive.with_suffix(".npy")
    if array.is_file() or archive.is_file():
        _unpack(archive, array)
        paths = _read_paths(root / "paths.pkl")
        n = len(np.load(array, mmap_mode="r"))
        if len(paths) != n:
            raise ValueError(f"{root / 'paths.pkl'} has {len(paths)} paths for {n} images")
        return {
            name: ImageArray(array, rows, labels)
            for name, (rows, labels) in _by_session(paths, categories).items()
        }
    files = image_files(tree if tree.is_dir() else root)
    return {
        name: ImageFiles([files[i] for i in rows], labels)
        for name, (rows, labels) in _by_session(map(str, files), categories).items()
    }


def _by_session(paths: Iterable[str], categories: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Indices and labels by session, from the file names alone."""
    sessions: dict[str, tuple[list[int], list[int]]] = {}
    for i, path in enumerate(paths):
        match = _NAME.search(path)
        if match is None or not (1 <= int(match[1]) <= 11 and 1 <= int(match[2]) <= 50):
            raise ValueError(f"{path} is not named C_SESSION_OBJECT_FRAME.png")
        indices, labels = sessions.setdefault(f"s{int(match[1])}", ([], []))
        indices.append(i)
        labels.append((int(match[2]) - 1) // 5 if categories else int(match[2]) - 1)
    return sessions


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's array once, so that it can be memory-mapped; other processes wait."""
    if target.is_file():
        return
    with FileLock(archive.with_name(f".{archive.stem}.lock")):
        if target.is_file():  # another process has unpacked it
            return
        for left_over in target.parent.glob(f".{target.name}.*.part"):
            left_over.unlink()
        try:
            with (
                zipfile.ZipFile(archive) as packed,
                packed.open("x.npy") as source,
                atomic_replace(target) as part,
                part.open("wb") as file,
            ):
                shutil.copyfileobj(source, file, 2**20)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ValueError(f"{archive} is damaged, or has no array 'x': {error}") from error


class _SafeUnpickler(pickle.Unpickler):
    """Loads lists and strings only, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _read_paths(file: Path) -> list[str]:
    try:
        paths = _SafeUnpickler(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged pickles raise all kinds of errors
        raise ValueError(f"{file} is not a pickled list of paths: {error}") from error
    if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
        raise ValueError(f"{file} is not a pickled list of paths")
    return paths
