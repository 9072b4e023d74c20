"""Weights from files: what is loaded, what is refused."""

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
def test_weights_of_a_file_are_all_loaded_but_for_the_head(squeezenet, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    state = squeezenet.state_dict()
    save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    model = create_backbone("squeezenet", 7, weights=file)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) != name.startswith("classifier")
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


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
