"""A fingerprint of the data of a run, without reading the images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from avalanche.benchmarks import CLScenario

from covon_avalanche.experiment.build import weights_file
from covon_avalanche.experiment.recipe import Recipe


def data_fingerprint(
    recipe: Recipe, benchmark: CLScenario, dataset_root: str | os.PathLike[str] | None
) -> dict[str, str]:
    """By domain and split the number of images and a hash of their paths and labels, and the size
    of the file of weights; empty where there are no such files.

    Paths are below the folder that all images share, so that a data set may be moved.
    """
    images = {
        f"the {split} images of {domain}": some
        for split, domains in getattr(benchmark, "images", {}).items()
        for domain, some in domains.items()
    }
    paths = {
        name: [file.absolute().as_posix() for file in getattr(some, "files", ())]  # or an array
        for name, some in images.items()
    }
    everything = [path for some in paths.values() for path in some]
    shared = len(os.path.commonpath(everything)) if everything else 0
    found = {
        name: _summary([path[shared:] for path in paths[name]] or [""] * len(some), some.labels)
        for name, some in images.items()
    }
    weights = weights_file(recipe.model, dataset_root)
    return found if weights is None else found | {"weights": f"{weights.stat().st_size} bytes"}


def _summary(paths: Sequence[str], labels: Sequence[int]) -> str:
    rows = sorted(f"{path}\t{int(label)}" for path, label in zip(paths, labels, strict=True))
    digest = hashlib.sha256("\n".join(rows).encode(errors="surrogateescape")).hexdigest()
    return f"{len(rows)} ({digest[:10]})"
