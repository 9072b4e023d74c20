"""CoVON's presets against AdamW at the same learning rate, and what ``gamma`` does.

    python benchmarks/presets.py --dataset-root DATA [PART ...]   run what is missing, then report
    python benchmarks/presets.py --report                         from stored results only

``sweep``: learning rates a factor of 3 around one that suits AdamW, batches of 8 and 256, 50
training images, for a multilayer perceptron, a residual network with batch norm, a pretrained
SqueezeNet and a pretrained ViT-S/14. ``knob``: five values of ``gamma`` on three streams.
Images are few, small and kept in memory: learning rates are guesses, nothing is searched. Results
go to ``benchmarks/results/presets/PART.jsonl``, table and figure to ``docs/presets.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    mean_and_std,
    new_figure,
    origin,
    read_cases,
    replace_part,
    run_cases,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from covon_avalanche import CoVON
from covon_avalanche.backbones import create_backbone
from covon_avalanche.merging import merge_into
from covon_avalanche.presets import FINETUNING, FROM_SCRATCH, PERCEPTRON
from covon_avalanche.streams import PACS, image_transforms

NAME = "benchmarks/presets.py"
PARTS = ("sweep", "knob")
PAGE = ROOT / "docs/presets.md"
STORED = {part: RESULTS / f"presets/{part}.jsonl" for part in PARTS}
NETWORKS: dict[str, Case] = {
    "mlp": dict(preset="scratch", lr=3e-3, epochs=20, batch=64, examples=1000),
    "resnet": dict(preset="scratch", lr=1e-3, epochs=5, batch=64, examples=1000),
    "squeezenet": dict(preset="finetuning", lr=1e-4, epochs=4, batch=32, examples=420),
    "vit": dict(preset="finetuning", lr=2e-5, epochs=2, batch=16, examples=140),
}
SWEEP = [{}, {"factor": 1 / 3}, {"factor": 3}, {"batch": 8}, {"batch": 256}, {"examples": 50}]
MORE_SEEDS = [("mlp", SWEEP[5]), ("vit", SWEEP[1]), ("vit", SWEEP[2]), ("vit", SWEEP[5])]
PRESETS = {"scratch": FROM_SCRATCH, "finetuning": FINETUNING}
GAMMAS = (0.03, 0.1, 0.3, 0.6, 1.0)
WEIGHTS = {
    "squeezenet": ("squeezenet", "squeezenet1_1_imagenet1k_fp16.safetensors"),
    "vit": ("timm/vit_small_patch14_dinov2", "vit_small_patch14_dinov2_saliency_fp16.safetensors"),
}
Task = tuple[Tensor, Tensor]


def make_network(name: str, root: Path) -> nn.Module:
    """Random weights, or pretrained ones."""
    if name == "mlp":
        layers = [nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(100, 10))
    if name == "resnet":
        first = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        blocks = [BasicBlock(32, 32), nn.MaxPool2d(2), BasicBlock(32, 32)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        return nn.Sequential(*first, *blocks, *head)
    backbone, file = WEIGHTS[name]
    size = {"image_size": 56} if name == "vit" else {}
    return create_backbone(backbone, 7, weights=str(root / "weights" / file), **size)


@cache
def pacs_images(root: Path, size: int) -> list[tuple[Task, Task]]:
    """Training and test images of each domain."""
    _, transform = image_transforms(size)
    found = []
    options = dict(train_transform=transform, eval_transform=transform, cache_size=size)
    benchmark = PACS(dataset_root=root / "PACS", **options)
    for pair in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        tasks = []
        for experience, n in zip(pair, (700, 200), strict=True):
            order = torch.randperm(len(experience.dataset), generator=torch.Generator())[:n]
            rows = [experience.dataset[int(i)] for i in order]
            x = torch.stack([row[0] for row in rows])
            tasks.append((x, torch.tensor([int(row[1]) for row in rows])))
        found.append((tasks[0], tasks[1]))
    return found


def stream(name: str, examples: int, seed: int, root: Path) -> list[tuple[Task, Task]]:
    """Pixel orders of digits, rotations for the residual network, or domains of PACS."""
    if name in WEIGHTS:
        domains = pacs_images(root, 56 if name == "vit" else 64)
        few = [((x[:examples], y[:examples]), test) for (x, y), test in domains]
        return few[:2] if name == "vit" else few  # which takes a minute for four
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(digits.target), generator=generator)
    y = torch.as_tensor(digits.target)[rows]
    x = torch.as_tensor(digits.images, dtype=torch.float32)[rows, None] / 16
    tasks = []
    for t in range(3):
        if name == "mlp":
            pixels = torch.randperm(64, generator=generator)
            images = x.flatten(1)[:, pixels].view_as(x)
        else:
            images = x.rot90(t, (2, 3))
        train, test = (images[:examples], y[:examples]), (images[1300:], y[1300:])
        tasks.append((train, test))
    return tasks


def make_optimizer(case: Case, model: nn.Module) -> Any:
    """AdamW, or CoVON with a preset."""
    if case["method"].startswith("adamw"):
        return torch.optim.AdamW(model.parameters(), lr=case["lr"])
    settings: Case = {"generator": torch.Generator().manual_seed(case["seed"])}
    if case["gamma"] is not None:
        settings["gamma"] = case["gamma"]
    preset = PRESETS[case["preset"]]
    if case["method"] == "covon-perceptron":
        preset = PERCEPTRON
    return CoVON(model.named_parameters(), **{**preset, "lr": case["lr"], **settings})


def batches(task: Task, case: Case, generator: torch.Generator) -> Iterator[Task]:
    """Batches of all epochs; an incomplete last one is dropped."""
    x, y = task
    size = min(case["batch"], len(y))
    for _ in range(case["epochs"]):
        for rows in torch.randperm(len(y), generator=generator).split(size):
            if len(rows) == size:
                yield x[rows], y[rows]


def measure(case: Case, root: Path) -> Case:
    """Learn the tasks one after the other.

    :return: ``matrix``, the accuracies on all tasks after each; ``learned``, those on each task
        before its merge; ``moved``, the root mean square of all changes of weights in the first
        task in units of ``lr``; or ``error``.
    """
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    tasks = stream(case["network"], case["examples"], case["seed"], root)
    model = make_network(case["network"], root)
    optimizer = make_optimizer(case, model)
    generator = torch.Generator().manual_seed(case["seed"])
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    matrix, learned, moved = [], [], 0.0
    for number, (train, test) in enumerate(tasks):
        if isinstance(optimizer, CoVON):
            for group in optimizer.param_groups:
                group["batch_size"] = min(case["batch"], len(train[1]))
                if group["ess"] is None:
                    group["examples"] = len(train[1])
        elif case["method"] == "adamw-renewed":
            optimizer = make_optimizer(case, model)
        steps = list(batches(train, case, generator))
        for i, (x, y) in enumerate(steps):
            decay = 0.05 + 0.95 * (1 + math.cos(math.pi * i / len(steps))) / 2
            for group in optimizer.param_groups:
                group["lr"] = case["lr"] * decay
            model.train()
            try:
                with optimizer.sampled_params() if isinstance(optimizer, CoVON) else nullcontext():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                if not math.isfinite(loss.item()):
                    return {"error": f"loss {loss.item()} in task {number}, step {i}"}
                optimizer.step()
            except (FloatingPointError, ValueError) as error:
                return {"error": str(error)}
        if number == 0:
            change = nn.utils.parameters_to_vector(model.parameters()).detach() - start
            moved = change.square().mean().sqrt().item() / case["lr"]
        learned.append(accuracy(model, test))
        if isinstance(optimizer, CoVON):
            size = min(case["batch"], len(train[1]))
            one_pass = partial(split, train, size)
            merge_into(model, optimizer, "eq8", batch_norm_batches=one_pass)
        matrix.append([accuracy(model, test) for _, test in tasks])
    return {"matrix": matrix, "learned": learned, "moved": moved}


def split(task: Task, size: int) -> Iterator[Task]:
    """One pass over the examples, for batch norm's statistics."""
    yield from zip(task[0].split(size), task[1].split(size), strict=True)


@torch.no_grad()
def accuracy(model: nn.Module, test: Task) -> float:
    """Share of right predictions."""
    model.eval()
    hits = [(model(x).argmax(1) == y).float() for x, y in split(test, 256)]
    return torch.cat(hits).mean().item()


def cases(part: str) -> list[Case]:
    """All of a part: three seeds, ten where CoVON was more than 3 points below AdamW in three."""
    found = []
    for seed in range(10):
        for network, settings in NETWORKS.items():
            common = {"network": network, "seed": seed, "gamma": None, **settings}
            if part == "sweep":
                for change in SWEEP:
                    if seed > 2 and (network, change) not in MORE_SEEDS:
                        continue
                    lr = settings["lr"] * change.get("factor", 1)
                    case = {**common, **change, "lr": lr}
                    case.pop("factor", None)
                    methods = ["adamw", "covon"]
                    if network == "mlp" or (network, change) in MORE_SEEDS:
                        methods.append("adamw-renewed")
                    if network == "mlp":
                        methods.append("covon-perceptron")
                    found += [{**case, "method": method} for method in methods]
            elif seed > 2:
                continue
            elif network != "vit":
                found += [{**common, "method": "covon", "gamma": gamma} for gamma in GAMMAS]
    return found


def scores(part: str) -> pd.DataFrame:
    """A_T, accuracy when learned and BWT in percent; 0 for a training that diverged."""
    rows = []
    for case in read_cases(STORED[part]):
        matrix = case.get("matrix")
        last = len(matrix) - 1 if matrix else 0
        bwt = [matrix[-1][t] - matrix[t][t] for t in range(last)] if matrix else [0.0]
        rows.append(
            {
                **case,
                "strategy": case["method"],
                "A_T": 100 * sum(matrix[-1]) / len(matrix) if matrix else 0.0,
                "learned": 100 * sum(case["learned"]) / len(matrix) if matrix else 0.0,
                "BWT": 100 * sum(bwt) / len(bwt),
            }
        )
    return pd.DataFrame(rows)


def sweep_table(found: pd.DataFrame) -> str:
    """A_T of both methods, a row per setting."""
    rows = []
    for key, group in found.groupby(["network", "lr", "batch", "examples"], sort=False):
        row: Case = dict(zip(("network", "lr", "batch", "examples"), key, strict=True))
        row["lr"] = f"{key[1]:.1e}"
        groups = dict(list(group.groupby("method")))
        if not {"adamw", "covon"} <= groups.keys():
            continue  # not finished
        for method, title in (("adamw", "AdamW"), ("covon", "CoVON")):
            own = groups[method]
            row[f"{title} A_T %"] = mean_and_std(own["A_T"], 1)
            row[f"{title} learned %"] = f"{own['learned'].mean():.1f}"
        other = groups.get("covon-perceptron")
        row["with `PERCEPTRON`"] = "" if other is None else mean_and_std(other["A_T"], 1)
        moved = {method: own["moved"].mean() for method, own in groups.items()}
        row["moved"] = f"{moved['covon'] / moved['adamw']:.2f}"
        rows.append(row)
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def knob_figure(found: pd.DataFrame, path: Path) -> None:
    """A_T, learned accuracy and BWT against gamma, mean over seeds."""
    networks = [name for name in NETWORKS if name in {*found["network"]}]
    with new_figure(path, 9, 3.2) as figure:
        panels = figure.subplots(1, len(networks))
        for axes, network in zip(panels, networks, strict=True):
            own = found[found["network"] == network].groupby("gamma")
            mean = own[["learned", "A_T", "BWT"]].mean()
            axes.plot(mean.index, mean["learned"], marker="s", label="learned, before the merge")
            axes.plot(mean.index, mean["A_T"], marker="o", label="A_T")
            axes.plot(mean.index, mean["BWT"], marker="D", label="BWT")
            axes.set(title=network, xlabel="gamma", xscale="log")
        panels[0].set(ylabel="%")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def write_report() -> None:
    """Table and figure."""
    found = scores("sweep")
    replace_part(PAGE, f"{NAME}, sweep", f"{sweep_table(found)}\n\n{origin(found)}")
    found = scores("knob")
    knob_figure(found, ROOT / "docs/settings-knob.png")
    text = "![Learned accuracy, A_T and BWT against gamma](settings-knob.png)"
    replace_part(PAGE, f"{NAME}, knob", f"{text}\n\n{origin(found)}")


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *STORED)
    for part in () if given.report else given.parts or STORED:
        STORED[part].parent.mkdir(exist_ok=True)
        key = ("network", "method", "seed", "gamma", "preset", "lr", "batch", "examples", "epochs")
        run_cases(
            cases(part), measure, STORED[part], given.dataset_root, key=key, processes=given.jobs
        )
    write_report()


if __name__ == "__main__":
    main()
