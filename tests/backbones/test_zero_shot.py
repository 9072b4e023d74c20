"""A head from the names of the classes: its logits are CLIP's own."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from covon_avalanche.backbones import create_backbone
from covon_avalanche.streams import image_transforms

open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")

NAMES = ["dog", "aircraft_carrier", "guitar", "The_Mona_Lisa"]
SIDES = {
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 48, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small CLIP, random, as a stored pretrained one: its name, itself and its file."""
    folder = tmp_path_factory.mktemp("clip")
    (folder / "tiny-clip.json").write_text(json.dumps({"embed_dim": 24, **SIDES}))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    clip = open_clip.create_model("tiny-clip").eval()
    with torch.no_grad():
        clip.logit_scale.fill_(3.0)
        clip.positional_embedding.normal_()  # far enough apart to tell names by
        clip.token_embedding.weight.normal_()
    save_file(clip.state_dict(), folder / "clip.safetensors")
    torch.save({"state_dict": clip.state_dict()}, folder / "clip.pt")
    return "open_clip/tiny-clip", clip, folder


@pytest.mark.parametrize("file", ["clip.safetensors", "clip.pt"])
def test_the_logits_are_those_of_both_sides(small, file):
    name, clip, folder = small
    model = create_backbone(name, 4, weights=folder / file, class_names=NAMES).eval()
    images = torch.randn(5, 3, 32, 32)
    sentences = [f"a photo of a {n.replace('_', ' ')}." for n in NAMES]
    tokens = open_clip.get_tokenizer("tiny-clip")(sentences)
    with torch.no_grad():
        x, t = clip.encode_image(images), clip.encode_text(tokens)
        x, t = x / x.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
        want = torch.e**3 * x @ t.T
        assert torch.allclose(model(images), want, atol=1e-4)
        assert want.std(1).min() > 0.01  # it could tell


@pytest.fixture(scope="module")
def timm_sided(tmp_path_factory):
    """The same with an image side of timm's and a bias of the logits, as SigLIP has."""
    pytest.importorskip("timm", reason="needs the extra vision")
    folder = tmp_path_factory.mktemp("timm")
    tower = {"image_size": 32, "timm_model_name": "test_convnext"}
    tower |= {"timm_pool": "avg", "timm_proj": "linear"}
    sides = {"vision_cfg": tower, "text_cfg": SIDES["text_cfg"]}
    config = {"embed_dim": 24, "init_logit_bias": -10, "custom_text": True, **sides}
    (folder / "tiny-timm.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    clip = open_clip.create_model("tiny-timm").eval()
    save_file(clip.state_dict(), folder / "clip.safetensors")
    return "open_clip/tiny-timm", clip, folder / "clip.safetensors"


def test_an_image_side_of_timm_has_heads_too(timm_sided):
    name, clip, file = timm_sided
    images = torch.randn(5, 3, 32, 32)
    linear = create_backbone(name, 3, weights=file).eval()
    assert linear(images).shape == (5, 3)
    assert torch.equal(linear.visual(images), clip.encode_image(images))
    model = create_backbone(name, 4, weights=file, class_names=NAMES).eval()
    tokens = open_clip.get_tokenizer("tiny-timm")(
        [f"a photo of a {n.replace('_', ' ')}." for n in NAMES]
    )
    with torch.no_grad():
        assert torch.allclose(model(images), clip.get_logits(images, tokens)[0], atol=1e-4)


def test_templates_are_averaged_as_directions(small):
    name, clip, folder = small
    templates = ["a photo of a {}.", lambda word: f"a {word} in a game."]
    options = {"weights": folder / "clip.safetensors", "templates": templates}
    model = create_backbone(name, 2, class_names=["dog", "guitar"], **options)
    tokenize = open_clip.get_tokenizer("tiny-clip")
    rows = []
    for word in ("dog", "guitar"):
        with torch.no_grad():
            both = clip.encode_text(tokenize([f"a photo of a {word}.", f"a {word} in a game."]))
        mean = nn.functional.normalize(both, dim=1).mean(0)
        rows.append(torch.e**3 * mean / mean.norm())
    assert torch.allclose(model.text_head.weight, torch.stack(rows), atol=1e-4)
    one = create_backbone(name, 2, weights=options["weights"], class_names=["dog", "guitar"])
    assert not torch.allclose(model.text_head.weight, one.text_head.weight, atol=1e-2)


def test_the_head_trains_as_a_linear_layer_and_is_stored_with_the_network(small, tmp_path):
    name, _, folder = small
    options = {"class_names": NAMES}
    model = create_backbone(name, 4, weights=folder / "clip.safetensors", **options)
    assert isinstance(model.text_head, nn.Linear)
    assert all(p.requires_grad for p in model.parameters())
    names = {n.partition(".")[0] for n, _ in model.named_parameters()}
    assert names == {"visual", "text_head"}  # the text side is gone
    before = model.text_head.weight.detach().clone()
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    nn.functional.cross_entropy(model(images), labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.text_head.weight, before)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    again = create_backbone(name, 4, weights=tmp_path / "mine.safetensors", **options)
    assert torch.equal(again.eval()(images), model.eval()(images))


def test_without_names_the_image_side_alone_is_loaded(small):
    name, clip, folder = small
    model = create_backbone(name, 3, weights=folder / "clip.safetensors").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.visual(images), clip.encode_image(images))
    assert model(images).shape == (2, 3)


def test_nothing_random_stands_in_for_pretrained(small, tmp_path):
    name, clip, folder = small
    file = folder / "clip.safetensors"
    with pytest.raises(ValueError, match="class_names need pretrained weights"):
        create_backbone(name, 4, class_names=NAMES)
    with pytest.raises(ValueError, match="open_clip has no weights '' for 'tiny-clip'"):
        create_backbone(name, 4, class_names=NAMES, weights="default")
    image_side = {k: v for k, v in clip.state_dict().items() if k.startswith("visual.")}
    save_file(image_side, tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match=r"half.safetensors does not fit.*missing: .*positional"):
        create_backbone(name, 4, class_names=NAMES, weights=tmp_path / "half.safetensors")
    stored = create_backbone(name, 4, weights=file, class_names=NAMES).state_dict()
    save_file(stored, tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"text_head.weight \(4, 24\) instead of \(2, 24\)"):
        create_backbone(name, 2, class_names=NAMES[:2], weights=tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"unknown: text_head.weight"):  # not without its names
        create_backbone(name, 4, weights=tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"one name a class; got 4 for 7 classes"):
        create_backbone(name, 7, class_names=NAMES, weights=file)
    with pytest.raises(ValueError, match=r"for open_clip's networks.*'squeezenet'"):
        create_backbone("squeezenet", 4, class_names=NAMES, weights=file)
    for templates in ([], "a {}"):
        with pytest.raises(ValueError, match="templates must be a list of at least one"):
            create_backbone(name, 4, class_names=NAMES, weights=file, templates=templates)


def test_a_tokenizer_that_needs_another_package_says_which(small, monkeypatch):
    name, _, folder = small

    def of_siglip(model_name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(open_clip, "get_tokenizer", of_siglip)
    with pytest.raises(ImportError, match=r"tokenizer of tiny-clip needs .*install trans"):
        create_backbone(name, 4, weights=folder / "clip.safetensors", class_names=NAMES)


def test_it_sees_images_of_a_stream(small):
    name, _, folder = small
    from PIL import Image

    _, evaluation = image_transforms(32)
    model = create_backbone(name, 4, weights=folder / "clip.pt", class_names=NAMES)
    assert model(evaluation(Image.new("RGB", (50, 40)))[None]).shape == (1, 4)
