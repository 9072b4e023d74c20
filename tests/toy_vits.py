"""Small vision transformers, and images of a few classes in a few domains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from torch import Tensor, nn
from toys import tensor_dataset

from covon_avalanche.backbones.libraries import ImageTower

CLASSES, SIZE = 3, 8


def toy_vit(depth: int = 5) -> nn.Module:
    """timm's, of width 16 with patches of 4 x 4 pixels; always the same weights."""
    vision = pytest.importorskip("timm.models.vision_transformer", reason="needs the extra vision")
    torch.manual_seed(0)
    shape = dict(img_size=SIZE, patch_size=4, embed_dim=16, depth=depth, num_heads=2)
    vit: nn.Module = vision.VisionTransformer(**shape, num_classes=CLASSES, init_values=0.5)
    for p in vit.parameters():  # so that no part is zero
        nn.init.normal_(p, std=0.3)
    return vit.eval()


def toy_clip(depth: int = 5) -> nn.Module:
    """open_clip's image tower with a head."""
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    torch.manual_seed(0)
    visual = open_clip.transformer.VisionTransformer(
        image_size=SIZE, patch_size=4, width=16, layers=depth, heads=2, mlp_ratio=2, output_dim=12
    )
    return ImageTower(visual, 12, CLASSES).eval()


def add_tiny_clip(folder: Path, layers: int = 2) -> str:
    """Name of a CLIP that is quickly created; its description goes to the folder."""
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    towers = {
        "vision_cfg": dict(image_size=32, layers=layers, width=16, head_width=8, patch_size=16),
        "text_cfg": dict(context_length=40, width=16, heads=2, layers=2),
    }
    file = folder / f"tiny-clip-of-{layers}-layers.json"
    file.write_text(json.dumps({"embed_dim": 12, **towers}))
    open_clip.add_model_config(file)
    return f"open_clip/{file.stem}"


def toy_images(domain: int, n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy patterns of each class, with the colours of a domain."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(7))
    colours = torch.randn(9, 3, 1, 1, generator=torch.Generator().manual_seed(8))[domain]
    y = torch.arange(n) % CLASSES
    x = patterns[y] + 2 * colours + 0.3 * torch.randn(n, 3, SIZE, SIZE, generator=generator)
    return x, y


def toy_image_benchmark(n_domains: int = 3) -> CLScenario:
    """One experience per domain."""

    def dataset(domain: int, seed: int):
        x, y = toy_images(domain, seed=seed)
        return tensor_dataset(x, y, task_labels=0)

    streams = {
        name: [dataset(domain, seed) for domain in range(n_domains)]
        for seed, name in enumerate(("train", "test"))
    }
    return with_task_labels(with_classes_timeline(benchmark_from_datasets(**streams)))
