"""Second moments of inputs against explicit matrices of inputs."""

import pytest
import torch
from timm.layers import Conv2dSame, Linear
from torch import nn

from covon_avalanche.merging import RegMean, merge_into
from covon_avalanche.merging.second_moments import input_second_moments

CONVOLUTIONS = {
    "3 x 3": dict(kernel_size=3, padding=1),
    "valid": dict(kernel_size=3, bias=False),
    "tall, dilated": dict(kernel_size=(4, 2), padding=(3, 1), dilation=(2, 3)),
    "reflecting": dict(kernel_size=5, padding=2, padding_mode="reflect"),
    "strided": dict(kernel_size=3, padding=1, stride=2),
    "patches": dict(kernel_size=4, stride=4),
    "pointwise": dict(kernel_size=1),
    "padded pointwise": dict(kernel_size=1, padding=1),
    "grouped": dict(kernel_size=3, padding="same", groups=2),
    "depthwise": dict(kernel_size=3, padding=1, groups=4),
    "wide": dict(kernel_size=(3, 9), padding=(1, 4), stride=(2, 1), groups=1, channels=64),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_moments_of_convolutions_are_those_of_unfolded_patches(kind, channels_last):
    torch.manual_seed(0)
    own = dict(CONVOLUTIONS[kind])
    channels = own.pop("channels", 4)
    layer = nn.Conv2d(channels, 8, **own)
    batches = [torch.randn(n, channels, 10, 9) for n in (3, 2)]
    if channels_last:
        batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    moments = input_second_moments(layer, [(x, None) for x in batches])[""]
    x = torch.cat(batches).double()
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    rows = nn.functional.unfold(x, layer.kernel_size, layer.dilation, stride=layer.stride)
    rows = rows.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
    torch.testing.assert_close(moments.double(), rows.mT @ rows, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("size", [7, 3])  # larger and smaller than the kernel
def test_a_layer_of_a_subclass_takes_part_if_it_computes_what_its_base_class_does(size):
    """Conv2dSame pads its input; timm's Linear is one."""
    layers = Conv2dSame(2, 3, 5, stride=2), nn.Flatten(), Linear(3 * ((size + 1) // 2) ** 2, 2)
    batches = [(torch.randn(4, 2, size, size), None)]
    assert set(input_second_moments(nn.Sequential(*layers), batches)) == {"2"}


def test_layers_with_arguments_or_outputs_of_their_own_do_not_take_part():
    class Scaled(nn.Linear):
        def forward(self, x, scale=1.0):
            return scale * super().forward(x), x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled, self.last = Scaled(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.scaled(x, scale=2.0)[0])

    assert set(input_second_moments(Net(), [(torch.randn(5, 3), None)])) == {"last"}


def test_moments_under_autocast_are_exact_sums_over_bfloat16_inputs():
    """And torch's setting for products on CPUs stays what it was."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 600, 1), nn.ReLU(), nn.Conv2d(600, 4, 1)), []
    model[2].register_forward_pre_hook(lambda module, args: x.append(args[0]))
    backend = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    before = getattr(backend, "fp32_precision", None)
    with torch.autocast("cpu", torch.bfloat16):
        moments = input_second_moments(model, [(torch.randn(9, 16, 20, 20), None)])
    assert x[0].dtype == torch.bfloat16
    rows = x[0].double().permute(0, 2, 3, 1).reshape(-1, 600)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    torch.testing.assert_close(moments["2"][0].double(), rows.T @ rows, rtol=1e-5, atol=1e-3)
    assert getattr(backend, "fp32_precision", None) == before


def test_moments_after_a_merge_within_autocast_are_those_of_the_merged_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, rule, optimizer = torch.randn(64, 4), RegMean(), torch.optim.SGD(net.parameters(), 0.1)
    known = {}
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        with torch.autocast("cpu", torch.bfloat16):
            merge_into(net, optimizer, rule, before=before, batches=lambda: [(x, x)])
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            now = input_second_moments(net, [(x, x)])
        known = {name: moments + known.get(name, 0) for name, moments in now.items()}
        torch.testing.assert_close(dict(rule.moments), known)
