"""How fast images come: our streams against torchvision's ImageFolder and a plain DataLoader.

    python benchmarks/image_throughput.py --dataset-root DATA           # about 10 minutes
    python benchmarks/image_throughput.py --dataset-root DATA --short   # a minute, prints only
    python benchmarks/image_throughput.py --table                       # from the stored results

The same files and batch size, and transforms that give the same up to rounding (torchvision's
and ours): crop and flip (training) or resize and central crop (evaluation) to 224 pixels, as
floats, normalised. PACS is the real one, in ``DATA/PACS``; the
other streams are made here with the shapes and formats of their images. All cases run
interleaved; figures are medians of the images per second and of the ratios to ImageFolder in
the same round. Results go to ``benchmarks/results/image-throughput.json``, the table to
``docs/streams.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from avalanche.training import Naive
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from covon_avalanche import TensorBatches
from covon_avalanche.streams import CDDB, PACS, CORe50, DomainFolders, DomainNet, image_transforms

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks/results/image-throughput.json"
NAME = "benchmarks/image_throughput.py"
SIZE, BATCH = 224, 32
BASE = "ImageFolder"
NORMALISE = [
    transforms.ToTensor(),
    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
USUAL = {
    "train": [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()],
    "eval": [transforms.Resize(SIZE * 8 // 7), transforms.CenterCrop(SIZE)],
}
Row = dict[str, Any]


# Images with the shapes and formats of the real ones ---------------------------------------


def paint(file: Path, shape: tuple[int, int], seed: int) -> None:
    """Smooth colours with some noise, so that it takes as many bytes as a photograph."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(shape, Image.Resampling.BICUBIC)).astype(float)
    grain = generator.normal(0, 8, smooth.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file)


def domainnet(root: Path, images: int) -> tuple[Path, dict[str, Any]]:
    shapes = [(640, 480), (300, 400), (800, 600), (500, 500)]  # the width comes first
    for part, i in ((p, i) for p in ("train", "test") for i in range(images)):
        name = ("aircraft_carrier", "axe", "zebra")[i % 3]
        paint(root / "real" / part / name / f"{i}.jpg", shapes[i % 4], i)
    return root / "real" / "train", {"build": DomainNet, "dataset_root": root, "domains": ["real"]}


def cddb(root: Path, images: int) -> tuple[Path, dict[str, Any]]:
    for part, i in ((p, i) for p in ("train", "val") for i in range(images)):
        paint(root / "gaugan" / part / ("0_real", "1_fake")[i % 2] / f"{i}.png", (256, 256), i)
    return root / "gaugan" / "train", {"build": CDDB, "dataset_root": root, "domains": ["gaugan"]}


def core50(root: Path, images: int) -> tuple[Path, dict[str, Any]]:
    for k in range(1, 12):
        for i in range(images if k == 1 else 1):
            number = 1 + i % 50
            name = f"C_{k:02d}_{number:02d}_{i:03d}.png"
            paint(root / f"s{k}" / f"o{number}" / name, (128, 128), i)
    return root / "s1", {"build": CORe50, "dataset_root": root, "domains": ["s1"]}


def folders(root: Path, images: int) -> tuple[Path, dict[str, Any]]:
    for part, i in ((p, i) for p in ("train", "test") for i in range(images)):
        paint(root / "day" / part / ("cat", "dog")[i % 2] / f"{i}.jpg", (320, 240), i)
    return root / "day" / "train", {
        "build": DomainFolders,
        "dataset_root": root,
        "domains": ["day"],
    }


def pacs(root: Path) -> tuple[Path, dict[str, Any]]:
    return root / "photo", {"build": PACS, "dataset_root": root, "domains": ["photo"]}


PACS_TITLE = "PACS (real, 128 x 128 JPEG)"
MADE = {
    "DomainNet (300 to 800 pixels, JPEG)": domainnet,
    "CDDB (256 x 256 PNG)": cddb,
    "CORe50 (128 x 128 PNG)": core50,
    "DomainFolders (320 x 240 JPEG)": folders,
}


# Measuring ---------------------------------------------------------------------------------


class FastNaive(TensorBatches, Naive):
    """Avalanche's Naive with batches from tensors where that is possible; nothing is kept."""

    tensor_batches_bytes = 0


def loader_of(data: Any, workers: int) -> Iterable[Any]:
    collate = getattr(data, "collate_fn", None)
    return DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
    )


def strategy_loader(data: Any, workers: int) -> Iterable[Any]:
    """What a strategy with ``TensorBatches`` reads in evaluation."""
    model = nn.Linear(1, 1)
    strategy = FastNaive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        eval_mb_size=BATCH,
        evaluator=None,
    )
    strategy.adapted_dataset = data
    strategy.make_eval_dataloader(num_workers=workers)
    return strategy.dataloader


def seconds_an_epoch(batches: Iterable[Any]) -> float:
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def measure(
    stream: str, plain: Path, options: dict[str, Any], scratch: Path, images: int, rounds: int
) -> list[Row]:
    """All cases of a stream, interleaved."""
    build = options.pop("build")
    start = time.perf_counter()
    cached = build(**options, cache=scratch)
    building = time.perf_counter() - start
    start = time.perf_counter()
    build(**options, cache=scratch)
    opening = time.perf_counter() - start
    ours = {"stream": build(**options), "stream, cache": cached}
    ours_by_kind = dict(zip(("train", "eval"), image_transforms(SIZE), strict=True))
    rows = []
    for kind in ("train", "eval"):
        usual = transforms.Compose([*USUAL[kind], *NORMALISE])
        folder = ImageFolder(str(plain), transform=usual)
        chosen = range(min(images, len(folder), len(cached.train_stream[0].dataset)))
        quick = ImageFolder(str(plain), transform=ours_by_kind[kind])
        data: dict[str, Any] = {
            BASE: Subset(folder, chosen),
            "ImageFolder, our transforms": Subset(quick, chosen),
        }
        for name, benchmark in ours.items():
            data[name] = getattr(benchmark.train_stream[0].dataset, kind)().subset(chosen)
        for workers in (0, 2):
            cases = {name: loader_of(some, workers) for name, some in data.items()}
            if kind == "eval" and workers == 0:
                name = "stream, cache, TensorBatches"
                cases[name] = strategy_loader(data["stream, cache"], 0)
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            for i in range(rounds + 1):  # the first starts the workers and warms up
                for name, batches in cases.items():
                    value = seconds_an_epoch(batches)
                    if i:
                        seconds[name].append(value)
            del cases, batches
            for name, values in seconds.items():
                ratios = [b / v for b, v in zip(seconds[BASE], values, strict=True)]
                rows.append(
                    {
                        "stream": stream,
                        "transform": kind,
                        "workers": workers,
                        "case": name,
                        "images": len(chosen),
                        "per_second": len(chosen) / statistics.median(values),
                        "ratio": statistics.median(ratios),
                        "lowest": min(ratios),
                        "highest": max(ratios),
                        "building_seconds": building,
                        "opening_seconds": opening,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def run(root: str | None, images: int, rounds: int) -> dict[str, Any]:
    """All streams; PACS where a folder with it is given."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # counts are not those of the real data
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if root is not None:
            plain, options = pacs(Path(root) / "PACS")
            rows += measure(PACS_TITLE, plain, options, scratch / "cache", images, rounds)
        for title, make in MADE.items():
            plain, options = make(scratch / make.__name__, images)
            rows += measure(title, plain, options, scratch / "cache", images, rounds)
    packages = ("torch", "torchvision", "pillow", "avalanche-lib")
    return {
        "rows": rows,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "versions": {package: version(package) for package in packages},
            "batch": BATCH,
            "rounds": rounds,
        },
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def report(stored: dict[str, Any]) -> str:
    """The table: images per second of each case, and the ratio to ImageFolder."""
    cases = list(dict.fromkeys(row["case"] for row in stored["rows"]))
    lines = [f"| | | workers | {' | '.join(cases)} |", "|---|---|---:|" + "---:|" * len(cases)]
    found = {(r["stream"], r["transform"], r["workers"], r["case"]): r for r in stored["rows"]}
    for key in dict.fromkeys(key[:3] for key in found):
        cells = []
        for case in cases:
            row = found.get((*key, case))
            text = "-" if row is None else f"{row['per_second']:,.0f}"
            if row is not None and case != BASE:
                text += f" ({row['ratio']:.1f})"
            cells.append(text)
        lines.append(f"| {' | '.join(map(str, (*key, *cells)))} |")
    machine = stored["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    lines += [
        "",
        f"Images per second, medians of {machine['rounds']} interleaved rounds.",
        f"In brackets: medians of the ratios to {BASE} within a round, not ratios of the medians.",
        "",
        f"<sub>{machine['processor']}, {machine['cores']} cores; {versions}</sub>",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-root", help="the folder that has PACS")
    parser.add_argument("--short", action="store_true", help="a minute; nothing is stored")
    parser.add_argument("--table", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    if arguments.short:
        print(report(run(arguments.dataset_root, 96, 1)))
        return
    if not arguments.table:
        stored = run(arguments.dataset_root, 960, 7)
        FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    from comparison import replace_part

    replace_part(ROOT / "docs/streams.md", NAME, report(stored))


if __name__ == "__main__":
    main()
