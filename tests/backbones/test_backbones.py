"""Networks with fresh heads and weights from files: what is loaded, what is refused."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import squeezenet1_1

from covon_avalanche import CoVON
from covon_avalanche.backbones import ALIASES, create_backbone, freeze, parameter_groups
from covon_avalanche.streams import PACS


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(0)
    return squeezenet1_1()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file_are_all_loaded_but_for_the_head(squeezenet, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    state = squeezenet.state_dict()
    save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    model = create_backbone("squeezenet", 7, weights=file)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) != name.startswith("classifier")
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_a_head_for_as_many_classes_is_taken_over(squeezenet, tmp_path):
    mine = create_backbone("squeezenet", 7)
    save_file(mine.state_dict(), tmp_path / "mine.safetensors")
    again = create_backbone("squeezenet", 7, weights=tmp_path / "mine.safetensors")
    pairs = zip(mine.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_wrong_files_are_refused_with_their_keys(squeezenet, tmp_path):
    state = squeezenet.state_dict()
    changed = {k: v for k, v in state.items() if k != "features.0.bias"}
    changed["features.3.squeeze.weight"] = torch.zeros(3, 3)
    changed["extra.weight"] = torch.zeros(1)
    save_file(changed, tmp_path / "changed.safetensors")
    message = (
        r"missing: features\.0\.bias; unknown: extra\.weight; "
        r"of another shape: features\.3\.squeeze\.weight \(3, 3\) instead of \(16, 64, 1, 1\)"
    )
    with pytest.raises(ValueError, match=message):
        create_backbone("squeezenet", 7, weights=tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match="there is no file"):
        create_backbone("squeezenet", 7, weights=tmp_path / "nowhere.pth")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        create_backbone("squeezenet", 7, weights=tmp_path / "text.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds no tensors by name"):
        create_backbone("squeezenet", 7, weights=tmp_path / "list.pth")


class Hostile:
    """A pickle that would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def test_nothing_in_a_file_is_run(tmp_path):
    torch.save({"w": Hostile(tmp_path / "harm")}, tmp_path / "hostile.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Hostile(tmp_path / "harm")))
    for name in ("hostile.pth", "plain.pth"):
        with pytest.raises(ValueError, match="no weights that can be loaded safely"):
            create_backbone("squeezenet", 7, weights=tmp_path / name)
    assert not (tmp_path / "harm").exists()


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


def test_open_clip_has_a_linear_head_on_its_image_tower():
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    model = create_backbone("open_clip/RN50", 5, image_size=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    name, _, tag = ALIASES["clip-b16"].partition("/")[2].partition(":")
    assert (name, tag) in open_clip.list_pretrained()
    with pytest.raises(ValueError, match="open_clip has no weights 'mine' for 'RN50'"):
        create_backbone("open_clip/RN50:mine", 5, weights="default")


def test_freezing_and_groups_by_pattern(squeezenet):
    model = create_backbone("squeezenet", 7)
    frozen = freeze(model, ["features.0.*", "features.3.*"])
    assert len(frozen) == 8
    assert all(p.requires_grad != (n in frozen) for n, p in model.named_parameters())
    groups = parameter_groups(model, {"classifier.*": {"lr": 0.1}, "*.bias": {"weight_decay": 0.5}})
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names[0] == ["classifier.1.weight", "classifier.1.bias"]
    assert all(name.endswith("bias") for name in names[1])
    assert sum(map(len, names)) + len(frozen) == len(list(model.parameters()))
    optimizer = CoVON(groups, ess=100)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match=r"no parameter's name matches 'layers\.\*'"):
        freeze(model, ["layers.*"])
    with pytest.raises(ValueError, match=r"no trainable parameter is left for .*'features\.0\.\*'"):
        parameter_groups(model, {"features.0.*": {}})
