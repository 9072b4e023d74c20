"""The input of a network's last layer."""

import pytest
import torch
from torch import nn

from covon_avalanche.plugins.features import penultimate_features


def test_features_of_a_convolutional_head_are_averaged_over_positions():
    body, head = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)
    model = nn.Sequential(body, head, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 3, 8, 8)
    with penultimate_features(model) as features:
        model(x)
    assert torch.allclose(features[0], body(x).mean((2, 3)), atol=1e-6)
    model(x)
    assert len(features) == 1  # only inside


def test_a_model_without_such_a_layer_is_named():
    match = "Flatten has no linear or convolutional layer"
    with pytest.raises(ValueError, match=match), penultimate_features(nn.Flatten()):
        pass
