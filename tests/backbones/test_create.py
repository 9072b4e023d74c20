"""Backbones by name, with weights from files; frozen parts."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import squeezenet1_1

from covon_avalanche.backbones import create_backbone


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(0)
    return squeezenet1_1()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_all_weights_of_a_file_are_loaded_and_its_head_where_it_fits(squeezenet, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    state = {name: value.half() for name, value in squeezenet.state_dict().items()}
    save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    for classes in (7, 1000):
        model = create_backbone("squeezenet", classes, weights=file)
        for name, value in model.state_dict().items():
            head = name.startswith("classifier") and classes == 7
            assert torch.equal(value, state[name].float()) != head
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 1000)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_of_wrapped_networks_are_loaded(squeezenet, tmp_path, prefix):
    state = {prefix + name: value for name, value in squeezenet.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "wrapped.pth")
    model = create_backbone("squeezenet", 1000, weights=tmp_path / "wrapped.pth")
    for name, value in model.state_dict().items():
        assert torch.equal(value, squeezenet.state_dict()[name])


def test_files_that_do_not_fit_are_refused_with_their_keys(squeezenet, tmp_path):
    changed = {k: v for k, v in squeezenet.state_dict().items() if k != "features.0.bias"}
    changed["features.3.squeeze.weight"] = torch.zeros(3, 3)
    changed["extra.weight"] = torch.zeros(1)
    file = tmp_path / "changed.safetensors"
    save_file(changed, file)
    with pytest.raises(ValueError, match=r"changed.safetensors does not fit squeezenet") as raised:
        create_backbone("squeezenet", 7, weights=file)
    for key in ("features.0.bias", "features.3.squeeze.weight", "extra.weight"):
        assert key in str(raised.value)


class Hostile:
    """A pickle that would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def test_other_files_are_refused_and_nothing_in_them_is_run(tmp_path):
    (tmp_path / "text.safetensors").write_text("no tensors")
    torch.save({"w": Hostile(tmp_path / "harm")}, tmp_path / "hostile.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Hostile(tmp_path / "harm")))
    for name in ("text.safetensors", "hostile.pth", "plain.pth"):
        with pytest.raises(ValueError, match=f"{name} holds no weights that can be loaded safely"):
            create_backbone("squeezenet", 7, weights=tmp_path / name)
    assert not (tmp_path / "harm").exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"other objects .*: save its state_dict\(\)$"):
        create_backbone("squeezenet", 7, weights=tmp_path / "whole.pt")
    for content in ([1, 2], None, {"w": "text"}, {0: torch.ones(2)}):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ValueError, match="must hold tensors by name, and nothing else"):
            create_backbone("squeezenet", 7, weights=tmp_path / "other.pth")
    with pytest.raises(ValueError, match="there is no file"):
        create_backbone("squeezenet", 7, weights=tmp_path / "nowhere.pth")
