"""An estimate of GPU hours for the paper's streams, in docs/streams.md. Nothing is timed.

    python benchmarks/gpu_hours.py

Floating-point operations of a training step are counted by torch for a ViT-B/16 at 224 pixels, and
multiplied by the images and epochs of the shipped recipes. Evaluation is one forward pass of all
test images after each domain. The permuted MNIST network is too small for its operations to matter,
so its steps are counted.
"""

from __future__ import annotations

import math

import pandas as pd
import torch
from comparison import ROOT, replace_part
from torch.utils.flop_counter import FlopCounterMode

from covon_avalanche.backbones import create_backbone
from covon_avalanche.domain_orders import core50_sessions
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report.tables import aligned
from covon_avalanche.streams import cddb, core50, domainnet

SUSTAINED = 100e12
"""Operations per second of one GPU, assumed: about a third of an A100's peak in bfloat16."""
STEP_SECONDS = 1e-3
"""Time of a step of the permuted MNIST network on a GPU, assumed: kernels wait for their launch."""
MNIST_IMAGES = 60_000


def vit_flops() -> tuple[int, int]:
    """Operations for one image: a forward pass, and a forward and a backward pass."""
    with torch.device("meta"):
        model = create_backbone("vit-b16-in21k-ft-in1k", 345, weights=None)
        x = torch.empty(1, 3, 224, 224)
    counted = []
    for train in (False, True):
        with FlopCounterMode(display=False) as counter:
            output = model(x)
            if train:
                output.sum().backward()
        counted.append(counter.get_total_flops())
    return counted[0], counted[1]


def images() -> dict[str, tuple[int, int, int]]:
    """Training images of all domains, test images, and domains, by recipe."""
    trained, tested = (sum(column) for column in zip(*domainnet.COUNTS.values(), strict=True))
    sessions = {int(name[1:]) for name in core50_sessions("official", 0)}
    known = dict(enumerate(core50.COUNTS, start=1))
    ours = sum(known[number] for number in sessions)
    return {
        "domainnet-vit": (trained, tested, len(domainnet.COUNTS)),
        "cddb-hard-vit": (*cddb.HARD_COUNTS, load_recipe("cddb-hard-vit").stream.n_experiences),
        "core50-vit": (ours, sum(core50.COUNTS) - ours, len(sessions)),
    }


def hours() -> pd.DataFrame:
    """Operations and GPU hours of one run of a method that trains all weights, by recipe."""
    forward, both = vit_flops()
    rows = []
    for name, (trained, tested, domains) in images().items():
        epochs = load_recipe(name).epochs
        operations = trained * epochs * both + domains * tested * forward
        rows.append((name, domains, trained, epochs, operations, operations / SUSTAINED / 3600))
    mnist = load_recipe("permuted-mnist-hard")
    domains = mnist.stream.n_experiences
    steps = domains * mnist.epochs * math.ceil(MNIST_IMAGES / mnist.train_mb_size)
    seconds = steps * STEP_SECONDS
    rows.append((mnist.name, domains, domains * MNIST_IMAGES, mnist.epochs, None, seconds / 3600))
    columns = ["recipe", "domains", "images", "epochs", "operations", "hours"]
    return pd.DataFrame(rows, columns=columns)


def table(rows: pd.DataFrame) -> str:
    """One line per recipe."""
    found = {
        "recipe": "`" + rows["recipe"] + "`",
        "domains": rows["domains"].map(str),
        "training images": rows["images"].map("{:,}".format),
        "epochs": rows["epochs"].map(str),
        "operations": rows["operations"].map(lambda n: "" if pd.isna(n) else f"{n:.1e}"),
        "GPU hours": rows["hours"].map("{:.2g}".format),
    }
    return aligned(pd.DataFrame(found))


def main() -> None:
    """Write the table."""
    _, both = vit_flops()
    text = (
        f"{table(hours())}\n\n"
        f"Estimated, not measured: {both / 1e9:.0f} GFLOP per training image of a ViT-B/16 at 224 "
        f"pixels, as torch counts them, at an assumed {SUSTAINED / 1e12:.0f} TFLOP/s sustained by "
        f"one GPU in bfloat16; {1000 * STEP_SECONDS:.0f} ms per step, also assumed, for the small "
        "network of permuted MNIST."
    )
    replace_part(ROOT / "docs/streams.md", "benchmarks/gpu_hours.py", text)


if __name__ == "__main__":
    main()
