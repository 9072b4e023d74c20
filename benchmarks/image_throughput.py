"""Images per second: our streams against torchvision's ImageFolder with a plain DataLoader.

    python benchmarks/image_throughput.py --dataset-root DATA           # about 10 minutes
    python benchmarks/image_throughput.py --dataset-root DATA --short   # a minute; prints only

The same files and batch size, and transforms that give the same up to rounding (torchvision's
and ours): crop and flip (training) or resize and central crop (evaluation) to 224 pixels, as
normalised floats. PACS is the real one, in ``DATA/PACS``; the other streams are generated with the
sizes and formats of their images. All cases take turns; figures are medians of the images per
second, and of the ratios to ImageFolder within a round. Results go to
``benchmarks/results/image-throughput.json``, the table to ``docs/streams.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from comparison import RESULTS, ROOT, FastNaive, provenance, replace_part, write_measurement
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from covon_avalanche.report.tables import aligned
from covon_avalanche.streams import CDDB, PACS, CORe50, DomainFolders, DomainNet, image_transforms

FILE = RESULTS / "image-throughput.json"
SIZE, BATCH = 224, 32
BASE = "ImageFolder"
TORCHVISION = {
    "train": [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()],
    "eval": [transforms.Resize(SIZE * 8 // 7), transforms.CenterCrop(SIZE)],
}
NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Stream = tuple[Any, str, str]
"""The function, its domain, and the folder of the domain's training images."""
STREAMS: dict[str, Stream] = {
    "PACS (real, 128 x 128 JPEG)": (PACS, "photo", "photo"),
    "DomainNet (300 to 800 pixels, JPEG)": (DomainNet, "real", "real/train"),
    "CDDB (256 x 256 PNG)": (CDDB, "gaugan", "gaugan/train"),
    "CORe50 (128 x 128 PNG)": (CORe50, "s1", "s1"),
    "DomainFolders (320 x 240 JPEG)": (DomainFolders, "day", "day/train"),
}


def write_images(root: Path, build: Any, images: int) -> None:
    """A domain of a stream, with images of its size and format."""
    wide = [(640, 480), (300, 400), (800, 600), (500, 500)]
    for i in range(images):
        if build is CORe50:
            name = f"s1/o{1 + i % 50}/C_01_{1 + i % 50:02d}_{i:03d}.png"
            write_image(root / name, (128, 128), i)
            continue
        for train in (True, False):
            part = "train" if train else "test"
            if build is DomainNet:
                kind = ("aircraft_carrier", "axe", "zebra")[i % 3]
                write_image(root / f"real/{part}/{kind}/{i}.jpg", wide[i % 4], i)
            elif build is CDDB:
                kind = ("0_real", "1_fake")[i % 2]
                part = "train" if train else "val"
                write_image(root / f"gaugan/{part}/{kind}/{i}.png", (256, 256), i)
            else:
                write_image(root / f"day/{part}/{('cat', 'dog')[i % 2]}/{i}.jpg", (320, 240), i)
    for k in range(2, 12) if build is CORe50 else ():
        write_image(root / f"s{k}/o1/C_{k:02d}_01_000.png", (128, 128), k)


def write_image(file: Path, shape: tuple[int, int], seed: int) -> None:
    """Smooth colours with some noise, so that it takes as many bytes as a photograph."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(shape, Image.Resampling.BICUBIC)).astype(float)
    grain = generator.normal(0, 8, smooth.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file)


def loader_of(data: Any, workers: int) -> Iterable[Any]:
    """A plain DataLoader."""
    collate = getattr(data, "collate_fn", None)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    return DataLoader(data, BATCH, shuffle=True, **options)


def strategy_loader(data: Any) -> Iterable[Any]:
    """What a strategy with ``TensorBatches`` reads in evaluation."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = FastNaive(model=model, optimizer=optimizer, eval_mb_size=BATCH, evaluator=None)
    strategy.adapted_dataset = data
    strategy.make_eval_dataloader()
    return strategy.dataloader


def loaders(
    streams: dict[str, Any], folder: Path, images: int, kind: str, workers: int
) -> tuple[dict[str, Iterable[Any]], int]:
    """A loader per case, and the number of images.

    :param kind: ``train`` or ``eval``: which transforms.
    """
    usual = transforms.Compose([*TORCHVISION[kind], transforms.ToTensor(), NORMALISE])
    ours = dict(zip(("train", "eval"), image_transforms(SIZE), strict=True))[kind]
    sets = {name: benchmark.train_stream[0].dataset for name, benchmark in streams.items()}
    known = ImageFolder(str(folder), transform=usual)
    chosen = range(min(images, len(known), *map(len, sets.values())))
    data: dict[str, Any] = {
        BASE: Subset(known, chosen),
        f"{BASE}, our transforms": Subset(ImageFolder(str(folder), transform=ours), chosen),
        **{name: getattr(some, kind)().subset(chosen) for name, some in sets.items()},
    }
    found = {name: loader_of(some, workers) for name, some in data.items()}
    if kind == "eval" and workers == 0:
        found["stream, cache, TensorBatches"] = strategy_loader(data["stream, cache"])
    return found, len(chosen)


def seconds_per_epoch(batches: Iterable[Any]) -> float:
    """The time of a pass over all batches."""
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def measure(root: Path | None, images: int, rounds: int) -> list[dict[str, Any]]:
    """All streams; PACS where a folder with it is given."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about counts other than the real data's
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for title, (build, domain, folder) in STREAMS.items():
            data = Path(scratch) / domain
            if build is PACS and root is None:
                continue
            if build is PACS:
                data = Path(root or "") / "PACS"
            else:
                write_images(data, build, images)
            own = {"dataset_root": data, "domains": [domain]}
            cached = build(**own, cache=Path(scratch) / "cache")
            streams = {"stream": build(**own), "stream, cache": cached}
            for kind in ("train", "eval"):
                for workers in (0, 2):
                    cases, count = loaders(streams, data / folder, images, kind, workers)
                    about = {"stream": title, "transform": kind, "workers": workers}
                    seconds = pd.DataFrame(  # the first round starts workers and warms up
                        {name: seconds_per_epoch(batches) for name, batches in cases.items()}
                        for _ in range(rounds + 1)
                    )[1:]
                    ratios = seconds.rdiv(seconds[BASE], axis=0)
                    found = {"per_second": count / seconds.median(), "ratio": ratios.median()}
                    found |= {"lowest": ratios.min(), "highest": ratios.max()}
                    table = pd.DataFrame(found).reset_index(names="case")
                    rows += [{**about, "images": count, **row} for row in table.to_dict("records")]
                    print(table.assign(**about).to_string(), flush=True)
    return rows


def table_of(rows: pd.DataFrame) -> str:
    """Images per second of each case, and the ratio to ImageFolder."""
    text = rows["per_second"].map("{:,.0f}".format)
    ratio = rows["ratio"].map(" ({:.1f})".format).mask(rows["case"] == BASE, "")
    index = ["stream", "transform", "workers"]
    order = [rows[name].unique() for name in index]
    table = rows.assign(text=text + ratio).pivot(index=index, columns="case", values="text")
    table = table.reindex(pd.MultiIndex.from_product(order, names=index))[rows["case"].unique()]
    table = table.fillna("-").reset_index(allow_duplicates=True)
    return aligned(table.set_axis(["", "", *table.columns[2:]], axis=1), left=2)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-root", type=Path, help="the folder that has PACS")
    parser.add_argument("--short", action="store_true", help="a minute; nothing is stored")
    parser.add_argument("--report", action="store_true", help="from stored results only")
    given = parser.parse_args()
    if given.short:
        print(table_of(pd.DataFrame(measure(given.dataset_root, 96, 1))))
        return
    if not given.report:
        rows = measure(given.dataset_root, 960, 7)
        about = {"script": "benchmarks/image_throughput.py", "batch": BATCH, "rounds": 7}
        write_measurement(FILE, rows, **about)
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    cores = stored["machine"]["cores"]
    rounds = (stored["machine"] | stored)["rounds"]  # version 0.1 had it in the machine
    said = (
        f"Images per second, medians of {rounds} interleaved rounds. In brackets: medians "
        f"of the ratios to {BASE} within a round, not ratios of the medians.\n\n"
        f"{provenance(stored, f'{cores} cores')}"
    )
    text = f"{table_of(pd.DataFrame(stored['rows']))}\n\n{said}"
    replace_part(ROOT / "docs/streams.md", "benchmarks/image_throughput.py", text)


if __name__ == "__main__":
    main()
