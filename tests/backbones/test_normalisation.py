"""Pixels are normalised as the weights were trained."""

import pytest
import torch
from PIL import Image

from covon_avalanche.backbones import ALIASES, create_backbone, normalisation
from covon_avalanche.streams import image_transforms


def test_each_library_tells_its_own():
    timm = pytest.importorskip("timm", reason="needs the extra vision")
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    assert normalisation("squeezenet") == {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }
    clip = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    assert normalisation("clip-b16") == normalisation("open_clip/RN50") == clip
    siglip = normalisation("open_clip/ViT-B-16-SigLIP:webli")
    assert siglip == {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    model = create_backbone("timm/vit_tiny_patch16_224", 5)
    found = normalisation("timm/vit_tiny_patch16_224")
    assert found == {key: tuple(model.pretrained_cfg[key]) for key in ("mean", "std")}
    assert normalisation("timm/resnet18.a1_in1k")["mean"] == timm.data.IMAGENET_DEFAULT_MEAN
    for alias in ALIASES:
        assert normalisation(alias) == normalisation(ALIASES[alias])


def test_the_streams_transforms_take_it():
    pytest.importorskip("timm", reason="needs the extra vision")
    colours = normalisation("vit-b16-in1k")  # from -1 to 1
    for transform in image_transforms(16, **colours):
        black, white = (transform(Image.new("RGB", (20, 20), c)) for c in ("black", "white"))
        assert torch.allclose(black, torch.tensor(-1.0))
        assert torch.allclose(white, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "LIBRARY/MODEL"),
        ("torchvision/resnet17", "torchvision has no model 'resnet17'"),
        ("timm/vit_huge", "timm has no model 'vit_huge'"),
        ("open_clip/RN51", "open_clip has no model 'RN51'"),
        ("open_clip/RN50:mine", "open_clip has no weights 'mine' for 'RN50'"),
    ],
)
def test_names_are_checked(name, message):
    if "/" in name:
        pytest.importorskip(name.partition("/")[0], reason="needs the extra vision")
    with pytest.raises(ValueError, match=message):
        normalisation(name)
