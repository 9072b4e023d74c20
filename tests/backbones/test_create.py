"""Backbones by name, with weights from files."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import squeezenet1_1

from covon_avalanche.backbones import create_backbone
from covon_avalanche.streams import PACS


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(0)
    return squeezenet1_1()


def test_a_head_for_as_many_classes_is_taken_over(squeezenet, tmp_path):
    mine = create_backbone("squeezenet", 7)
    save_file(mine.state_dict(), tmp_path / "mine.safetensors")
    again = create_backbone("squeezenet", 7, weights=tmp_path / "mine.safetensors")
    pairs = zip(mine.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


IMAGENET_CLASSES = {  # of PACS's: ids of dogs, elephants, guitars
    "dog": range(151, 269),
    "elephant": (101, 385, 386),
    "guitar": (402, 546),
}


def test_imagenet_weights_recognise_what_pacs_shows(real_data):
    """The real weights with the usual transform: most photographs, where chance is 4 %."""
    file = real_data("weights") / "weights/squeezenet1_1_imagenet1k_fp16.safetensors"
    model = create_backbone("squeezenet", 1000, weights=file).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    photos = PACS(dataset_root=real_data("PACS") / "PACS", domains=["photo"], limit=12)
    hits = []
    for x, y, _ in photos.test_stream[0].dataset:
        ids = IMAGENET_CLASSES.get(photos.classes[y])
        if ids is not None:
            with torch.no_grad():
                hits.append(model(x[None]).argmax().item() in ids)
    assert len(hits) == 36
    assert sum(hits) > 18


def test_names_are_checked():
    with pytest.raises(ValueError, match=r"LIBRARY/MODEL with one of .*got 'resnet18'"):
        create_backbone("resnet18", 7)
    with pytest.raises(ValueError, match="torchvision has no model 'resnet17'"):
        create_backbone("torchvision/resnet17", 7)
    with pytest.raises(ValueError, match="'googlenet' has auxiliary outputs"):
        create_backbone("torchvision/googlenet", 7)
    with pytest.raises(ValueError, match="num_classes must be >= 1, got 0"):
        create_backbone("squeezenet", 0)
