"""Heads for the networks of torchvision, timm and open_clip, and their normalisation."""

from functools import partial
from types import SimpleNamespace

import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import _api
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings
from toy_vits import add_tiny_clip

from covon_avalanche.backbones import ALIASES, create_backbone, normalisation
from covon_avalanche.streams import image_transforms


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_b0"])
def test_torchvision_heads(name):
    model = create_backbone(f"torchvision/{name}", 5).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_position_embeddings_of_torchvision_are_resampled(tmp_path, monkeypatch):
    def tiny(weights=None, image_size=32):
        return VisionTransformer(image_size, 8, 1, 2, 16, 16)

    state = tiny().state_dict()
    save_file(state, tmp_path / "vit.safetensors")
    downloaded = SimpleNamespace(get_state_dict=lambda **_: dict(state))
    monkeypatch.setitem(_api.BUILTIN_MODELS, "vit_tiny", tiny)
    known = SimpleNamespace(DEFAULT=downloaded)
    monkeypatch.setattr("torchvision.models.get_model_weights", lambda _: known)
    wanted = interpolate_embeddings(64, 8, dict(state))["encoder.pos_embedding"]
    for weights in ("default", tmp_path / "vit.safetensors"):
        model = create_backbone("torchvision/vit_tiny", 3, weights=weights, image_size=64)
        assert torch.equal(model.encoder.pos_embedding, wanted)
        assert torch.equal(model.conv_proj.weight, state["conv_proj.weight"])
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_timm_heads_tags_and_sizes():
    tags = timm.list_pretrained()
    for alias in ALIASES.values():
        library, _, name = alias.partition("/")
        assert library != "timm" or name in tags
    without_head = "vit_small_patch14_dinov2.lvd142m"
    assert timm.get_pretrained_cfg(without_head).num_classes == 0
    for name, size in ((without_head, 28), ("vit_tiny_patch16_224", 64), ("resnet18", 64)):
        model = create_backbone(f"timm/{name}", 5, image_size=size)
        assert model(torch.randn(2, 3, size, size)).shape == (2, 5)
    if timm.is_model("qwen3_vit_88m_enc"):
        with pytest.raises(ValueError, match="has no classifier"):
            create_backbone("timm/qwen3_vit_88m_enc", 5)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224.augreg_in21k_ft_in1k", "deit_tiny_distilled_patch16_224"]
)
def test_timm_networks_of_two_heads_or_none_and_their_files(name, tmp_path, monkeypatch):
    """The weights of DINOv2 or MAE have no classifier, distilled ones have two; of one layer."""
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))
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


def test_position_embeddings_of_timm_are_resampled_with_or_without_class_token(tmp_path):
    for name, prefix in (("cait_xxs24_224", 0), ("deit_tiny_distilled_patch16_224", 2)):
        state = timm.create_model(name).state_dict()
        save_file(state, tmp_path / "large.safetensors")
        options = {"weights": tmp_path / "large.safetensors", "image_size": 64}
        model = create_backbone(f"timm/{name}", 5, **options)
        assert model.pos_embed.shape[1] == prefix + 4 * 4
        assert torch.equal(model.pos_embed[:, :prefix], state["pos_embed"][:, :prefix])
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    state = timm.create_model("volo_d1_224").state_dict()
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"(?s)does not fit timm/volo_d1_224: .* for pos_embed"):
        options["weights"] = tmp_path / "other.safetensors"
        create_backbone("timm/volo_d1_224", 5, **options)


def test_the_image_tower_of_a_complete_clip_is_loaded_without_a_warning(tmp_path, caplog):
    name = add_tiny_clip(tmp_path)
    clip = open_clip.create_model(name.removeprefix("open_clip/")).eval()
    save_file(clip.state_dict(), tmp_path / "clip.safetensors")
    caplog.clear()
    model = create_backbone(name, 3, weights=tmp_path / "clip.safetensors").eval()
    assert not caplog.records
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.visual(images), clip.encode_image(images))
    again = create_backbone(name, 3, weights=tmp_path / "mine.safetensors").eval()
    assert torch.equal(again(images), model(images))
    assert model(images).shape == (2, 3)


def activations(model):
    return {type(m).__name__ for m in model.modules() if "GELU" in type(m).__name__.upper()}


@pytest.mark.parametrize("weights", [None, "FILE"])
def test_the_activation_is_that_of_the_weights_of_the_tag(tmp_path, weights, monkeypatch):
    """The tags of one architecture, here a small one, whose weights have the same shapes."""
    small = open_clip.get_model_config("ViT-B-32")
    for tower in ("vision_cfg", "text_cfg"):
        small[tower]["layers"] = 1
    small["text_cfg"]["vocab_size"] = 99
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-B-32", small)
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))
    for family, tags in (
        ("open_clip/ViT-B-32", {":openai": "QuickGELU", ":laion2b_e16": "GELU", "": "GELU"}),
        ("timm/vit_base_patch32_clip_224", {".openai": "QuickGELU", ".laion2b": "GELU"}),
    ):
        file = None
        if weights:
            file = tmp_path / "weights.safetensors"
            save_file(create_backbone(family, 2).state_dict(), file)
        for tag, activation in tags.items():
            assert activations(create_backbone(family + tag, 2, weights=file)) == {activation}
    with pytest.raises(ValueError, match="open_clip has no weights 'mine' for 'ViT-B-32'"):
        create_backbone("open_clip/ViT-B-32:mine", 2)


def test_normalisation_is_that_of_the_weights():
    imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert normalisation("squeezenet") == imagenet
    clip = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    assert normalisation("clip-b16") == normalisation("open_clip/RN50") == clip
    siglip = normalisation("open_clip/ViT-B-16-SigLIP:webli")
    assert siglip == {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    assert normalisation("timm/resnet18.a1_in1k")["mean"] == timm.data.IMAGENET_DEFAULT_MEAN
    for transform in image_transforms(16, **normalisation("vit-b16-in1k")):  # from -1 to 1
        black, white = (transform(Image.new("RGB", (20, 20), c)) for c in ("black", "white"))
        assert torch.allclose(black, torch.tensor(-1.0))
        assert torch.allclose(white, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "LIBRARY/MODEL with one of .*got 'resnet18'"),
        ("torchvision/resnet17", "Unknown model resnet17"),
        ("timm/vit_huge", "timm has no model or weights 'vit_huge'"),
        ("timm/resnet18.mine", "timm has no model or weights 'resnet18.mine'"),
        ("open_clip/RN51", "open_clip has no model 'RN51'"),
        ("open_clip/RN50:mine", "open_clip has no weights 'mine' for 'RN50'"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        create_backbone(name, 5, weights="default")
    with pytest.raises(ValueError, match=message):
        normalisation(name)


def test_networks_that_cannot_have_one_head_are_refused():
    with pytest.raises(ValueError, match="'googlenet' has auxiliary outputs"):
        create_backbone("torchvision/googlenet", 7)
    with pytest.raises(ValueError, match="num_classes must be an integer >= 1, got 0"):
        create_backbone("squeezenet", 0)
