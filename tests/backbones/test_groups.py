"""Parameters by patterns of their names."""

import pytest
import torch
from torch import nn
from torchvision.models import squeezenet1_1

from covon_avalanche import CoVON
from covon_avalanche.backbones import create_backbone, freeze, parameter_groups


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(0)
    return squeezenet1_1()


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
