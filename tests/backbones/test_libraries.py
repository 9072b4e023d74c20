"""Heads for the networks of torchvision, timm and open_clip."""

import pytest
import torch
from safetensors.torch import save_file

from covon_avalanche.backbones import ALIASES, create_backbone


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_b0"])
def test_torchvision_heads(name):
    model = create_backbone(f"torchvision/{name}", 5).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_timm_heads_tags_and_sizes():
    timm = pytest.importorskip("timm", reason="needs the extra vision")
    model = create_backbone("timm/vit_tiny_patch16_224", 5, image_size=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    assert model.num_classes == 5
    with pytest.raises(ValueError, match="timm has no model 'vit_huge'"):
        create_backbone("timm/vit_huge", 5)
    tags = timm.list_pretrained()
    for alias in ALIASES.values():
        library, _, name = alias.partition("/")
        assert library != "timm" or name in tags


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224.augreg_in21k_ft_in1k", "deit_tiny_distilled_patch16_224"]
)
def test_timm_networks_of_two_heads_or_none_and_their_files(name, tmp_path):
    """As for DINOv2 or MAE: their weights have no classifier; distilled ones have two."""
    timm = pytest.importorskip("timm", reason="needs the extra vision")
    bare = timm.create_model(name, num_classes=0).state_dict()
    save_file(bare, tmp_path / "bare.safetensors")
    other = timm.create_model(name, num_classes=9).state_dict()
    save_file(other, tmp_path / "other.safetensors")
    for file, weights in (("bare", bare), ("other", other)):
        model = create_backbone(f"timm/{name}", 5, weights=tmp_path / f"{file}.safetensors")
        assert model(torch.randn(2, 3, 224, 224)).shape == (2, 5)
        for key, value in model.state_dict().items():
            assert key.startswith("head") or torch.equal(value, weights[key])
    mine = create_backbone(f"timm/{name}", 9, weights=tmp_path / "other.safetensors")
    assert all(torch.equal(value, other[key]) for key, value in mine.state_dict().items())


def test_timm_networks_without_a_classifier_get_one_and_those_of_any_size_stay():
    timm = pytest.importorskip("timm", reason="needs the extra vision")
    name = "vit_small_patch14_dinov2.lvd142m"
    assert timm.get_pretrained_cfg(name).num_classes == 0
    model = create_backbone(f"timm/{name}", 5, image_size=28)
    assert model(torch.randn(2, 3, 28, 28)).shape == (2, 5)
    model = create_backbone("timm/resnet18", 5, image_size=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"timm has no weights 'resnet18\.mine'"):
        create_backbone("timm/resnet18.mine", 5)
    if timm.is_model("qwen3_vit_88m_enc"):
        with pytest.raises(ValueError, match="has no classifier"):
            create_backbone("timm/qwen3_vit_88m_enc", 5)


def test_weights_of_open_clip_are_checked():
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    name, _, tag = ALIASES["clip-b16"].partition("/")[2].partition(":")
    assert (name, tag) in open_clip.list_pretrained()
    with pytest.raises(ValueError, match="open_clip has no weights 'mine' for 'RN50'"):
        create_backbone("open_clip/RN50:mine", 5, weights="default")
