"""``covon env``."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from covon_avalanche.cli.options import DatasetRoot
from covon_avalanche.datasets.catalogue import CATALOGUE
from covon_avalanche.experiment.data_settings import PermutedStream, data_root, missing_mnist

_HOME = Path("~").expanduser()  # of the user: a command may replace one that cannot be written
_OTHERS = ("torchvision", "timm", "open_clip_torch", "numba", "pandas", "pydantic")


def env(dataset_root: DatasetRoot = None) -> None:
    """Print what a bug report needs: versions, hardware and data sets.

    Your names and folders are not printed.
    """
    import torch

    from covon_avalanche.experiment.machine import machine, versions
    from covon_avalanche.experiment.precision import has_bfloat16

    found = {**versions(), **{name: _version(name) for name in _OTHERS}, **machine("cpu")}
    bfloat16 = ", bfloat16" if has_bfloat16("cpu") else ""
    found["instructions"] = torch.backends.cpu.get_cpu_capability() + bfloat16
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpus = [f"cuda:{i} {name} (CUDA {torch.version.cuda})" for i, name in enumerate(names)]
    found["devices"] = ", ".join(["cpu", *gpus, *["mps"] * torch.mps.device_count()])
    root = data_root(dataset_root)
    data = [name for name, dataset in CATALOGUE.items() if (root / dataset.folder).is_dir()]
    mnist = PermutedStream(name="PermutedMNIST", n_experiences=1)
    data += ["MNIST"] if missing_mnist(mnist, dataset_root) is None else []
    found["data sets"] = ", ".join(data) or "none"
    found["home is writable"] = "yes" if os.access(_HOME, os.W_OK) else "no"
    for key, value in found.items():
        typer.echo(f"{key}: {value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
