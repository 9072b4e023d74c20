"""The text tower of a CLIP: as open_clip encodes texts, with words or learned context."""

import pytest
import torch
from safetensors.torch import save_file
from toy_text import NAMES, tokenize, toy_clip_with_text, whole_clip
from toy_vits import add_tiny_clip

from covon_avalanche.backbones import create_backbone
from covon_avalanche.backbones.text_tower import TextTower


@pytest.fixture
def text():
    return toy_clip_with_text().text


@torch.no_grad()
def test_without_context_it_encodes_the_names(text):
    wanted = text.clip.encode_text(tokenize(["dog.", "police car.", "fish."]))
    torch.testing.assert_close(text(), wanted)
    assert (wanted[0] - wanted[1]).norm() > 0.1
    assert text.longest == 5  # start, police, car, period, end
    assert text.scale == pytest.approx(1 / 0.07)


@torch.no_grad()
def test_context_precedes_the_names(text):
    """With the embeddings of words as context it is the encoding of a sentence."""
    words = tokenize("a photo of a")[0, 1:5]
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    wanted = text.clip.encode_text(tokenize(sentences))
    found = text(text.clip.token_embedding(words))
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, text(), atol=0.01)


def test_context_that_does_not_fit_and_other_towers_are_refused(text):
    text(torch.zeros(25, 16))
    with pytest.raises(ValueError, match="26 context tokens and class names of up to 5 tokens do "):
        text(torch.zeros(26, 16))
    for clip in (whole_clip(no_causal_mask=True), whole_clip(pool_type="last")):
        with pytest.raises(ValueError, match="need a text tower as that of CLIP"):
            TextTower(clip, tokenize, NAMES)


def test_both_towers_of_a_file_are_loaded(tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="needs the extra vision")
    name, file = add_tiny_clip(tmp_path), tmp_path / "clip.safetensors"
    clip = open_clip.create_model(name.removeprefix("open_clip/")).eval()
    save_file(clip.state_dict(), file)
    model = create_backbone(name, 3, weights=file, class_names=NAMES).eval()
    images = torch.randn(2, 3, 64, 64)
    larger = create_backbone(name, 3, weights=file, class_names=NAMES, image_size=64).eval()
    assert larger(images).shape == (2, 3)
    with torch.no_grad():
        assert torch.equal(model.visual(images[..., :32, :32]), clip.visual(images[..., :32, :32]))
        wanted = clip.encode_text(tokenize(["dog.", "police car.", "fish."], 40))
        torch.testing.assert_close(model.text(), wanted)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    again = create_backbone(name, 3, weights=tmp_path / "mine.safetensors", class_names=NAMES)
    torch.testing.assert_close(again.eval().text(), model.text())
    assert create_backbone(name, 3, weights=file).text is None
    visual = {key: v for key, v in clip.state_dict().items() if key.startswith("visual.")}
    save_file(visual, tmp_path / "visual.safetensors")
    with pytest.raises(ValueError, match=r"visual.safetensors has no text tower, which class name"):
        create_backbone(name, 3, weights=tmp_path / "visual.safetensors", class_names=NAMES)


def test_names_need_a_clip_and_one_name_a_class():
    with pytest.raises(ValueError, match="squeezenet has no text tower: choose a CLIP"):
        create_backbone("squeezenet", 3, class_names=NAMES)
    with pytest.raises(ValueError, match="4 classes need as many names, got 3"):
        create_backbone("clip-b16", 4, class_names=NAMES)
