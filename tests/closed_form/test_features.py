"""Features of frozen networks against their own modules."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer, resnet18, squeezenet1_1

from covon_avalanche.closed_form import FeatureExtractor, blocks_of
from covon_avalanche.last_layer import last_layer


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5).eval()


def test_blocks():
    assert blocks_of(squeezenet1_1()) == [f"features.{i}" for i in (3, 4, 6, 7, 9, 10, 11, 12)]
    assert blocks_of(resnet18()) == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]


def test_class_tokens_of_the_last_blocks_of_a_transformer(vit):
    assert blocks_of(vit) == [f"blocks.{i}" for i in range(12)]
    x = torch.randn(2, 3, 32, 32)
    tokens = vit.forward_intermediates(
        x, indices=[9, 10, 11], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )
    expected = torch.cat([prefix[:, 0] for _, prefix in tokens], 1)
    torch.testing.assert_close(FeatureExtractor(vit, 3)(x), expected)
    pooled = vit.forward_head(vit.forward_features(x), pre_logits=True)
    torch.testing.assert_close(FeatureExtractor(vit)(x), pooled)


def test_maps_of_a_convolutional_network_are_pooled():
    network = squeezenet1_1(num_classes=4).eval()
    x = torch.randn(2, 3, 64, 64)
    maps = [network.features[:12](x), network.features(x)]
    mean = torch.cat([m.mean((2, 3)) for m in maps], 1)
    torch.testing.assert_close(FeatureExtractor(network, 2)(x), mean)
    both = torch.cat([f for m in maps for f in (m.mean((2, 3)), m.amax((2, 3)))], 1)
    torch.testing.assert_close(FeatureExtractor(network, 2, "mean+max")(x), both)
    torch.testing.assert_close(FeatureExtractor(network)(x), maps[-1].mean((2, 3)))


SAM = dict(depth=2, embed_dim=32, num_heads=2, global_attn_indexes=[1])


@pytest.mark.parametrize(
    ("name", "options"),
    [("swin_tiny_patch4_window7_224", {"window_size": 2}), ("samvit_base_patch16_224", SAM)],
)
def test_maps_with_channels_last_are_pooled_over_positions(name, options):
    torch.manual_seed(0)
    network = timm.create_model(name, img_size=64, **options).eval()
    x = torch.randn(2, 3, 64, 64)
    maps = network.forward_intermediates(x, indices=1, norm=False, intermediates_only=True)
    for wrap in (lambda n: n, lambda n: nn.Sequential(nn.Identity(), n), nn.DataParallel):
        features = FeatureExtractor(wrap(network), 1)(x)
        torch.testing.assert_close(features, maps[-1].mean((2, 3)))


def test_a_compiled_network_may_have_been_called_before():
    network, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(5, 4)
    wanted = FeatureExtractor(network)(x)
    compiled = torch.compile(network, backend="eager")
    with torch.no_grad():
        compiled(x)
    torch.testing.assert_close(FeatureExtractor(compiled)(x), wanted)
    whole = torch.compile(FeatureExtractor(network), backend="eager")
    torch.testing.assert_close(whole(x), wanted)


class Block(nn.Module):
    """Begins with an activation in place, which changes the output of the block before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.relu_())


def test_features_are_those_before_later_layers_change_them_in_place():
    network, x = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 2)).eval(), torch.randn(5, 4)
    second = network[:2](x.clone()).detach()
    wanted = torch.cat([second, network[2](second.clone()).detach()], 1)
    torch.testing.assert_close(FeatureExtractor(network, 2)(x.clone()), wanted)


def test_blocks_of_torchvisions_transformers():
    """A class token of another name, and channels last without a note of it."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    sizes = dict(num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)
    vit = VisionTransformer(image_size=32, patch_size=8, **sizes).eval()
    swin = SwinTransformer([2, 2], 8, [2, 2], [2, 2], [2, 2], num_classes=3).eval()
    outputs = []
    vit.encoder.layers[-1].register_forward_hook(lambda *call: outputs.append(call[2][:, 0]))
    swin.features[-1][-1].register_forward_hook(lambda *call: outputs.append(call[2].mean((1, 2))))
    for network in (vit, swin):
        features = FeatureExtractor(network, 1)(x)
        assert torch.equal(features, outputs[-1])


def test_blocks_of_transformers_return_their_hidden_states_first():
    transformers = pytest.importorskip("transformers", reason="needs the extra language")
    torch.manual_seed(0)
    sizes = dict(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2])
    config = transformers.SwinConfig(**sizes, window_size=2)
    swin = transformers.SwinForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    states = swin(x, output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden.mean(1) for hidden in states[1:]], 1)
    torch.testing.assert_close(FeatureExtractor(swin, 2)(x), wanted)


def test_the_network_is_frozen_and_stays_in_evaluation_mode():
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
    features = FeatureExtractor(network)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    network.forward = lambda x: network[3](input=network[:3](x))  # a named argument will do
    x = torch.randn(5, 4)
    first = features(x)
    torch.testing.assert_close(first, network[:3](x))
    features.train()
    assert torch.equal(features(x), first)
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in before.items())
    assert not any(p.requires_grad for p in features.parameters())


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"blocks must be between 1 and 8, the number of .* got 9"):
        FeatureExtractor(squeezenet1_1(), 9)
    with pytest.raises(ValueError, match=r"pool must be one of 'mean', 'mean\+max', got 'max'"):
        FeatureExtractor(squeezenet1_1(), 2, "max")
    with pytest.raises(ValueError, match="Flatten has no linear or convolutional layer"):
        FeatureExtractor(nn.Flatten())


def test_a_last_layer_may_be_parametrised_or_replace_that_of_timm():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    replaced = timm.create_model("mobilenetv3_small_050", num_classes=0)
    replaced.classifier = nn.Linear(replaced.head_hidden_size, 3)
    for network, name in (
        (nn.Sequential(nn.ReLU(), spectral), "1"),
        (nn.Sequential(spectral, spectral), "1"),
        (replaced, "classifier"),
    ):
        assert last_layer(network) == name
    assert last_layer(spectral) == ""


@pytest.mark.parametrize("how", ["timm's", "timm's, a convolution", "replaced", "truncated"])
def test_a_network_without_classifier_is_refused(how):
    """Its last layer is inside of the last block, or of a head."""
    network = resnet18()
    if how == "replaced":
        network.fc = nn.Identity()
    elif how == "truncated":
        network = nn.Sequential(*[*network.children()][:-1])
    else:
        name = "test_vit" if how == "timm's" else "mobilenetv3_small_050"
        network = timm.create_model(name, num_classes=0)
    with pytest.raises(ValueError, match=r"has no classifier \(num_classes=0, or a head that was"):
        FeatureExtractor(network)
    if how != "truncated":
        assert FeatureExtractor(network, blocks=2)(torch.randn(2, 3, 160, 160)).dim() == 2
