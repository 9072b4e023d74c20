"""CoVON on bfloat16 weights: the mean is float32, and they are its rounded values or a sample's."""

import copy
import warnings

import pytest
import torch
from torch import nn
from toy_optimizers import equal, train

from covon_avalanche import CoVON, DiagGaussian

SETTINGS = {
    "natural units": dict(lr=1e-3),
    "pretrained": dict(lr=1e-3, prior_mean="init", noise=0.01),
    "paper's units": dict(lr=0.05, ess=1e5, batch_size=8),
}


def model(dtype) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    return made.bfloat16().to(dtype)  # the same values


def make(net, **settings) -> CoVON:
    settings.setdefault("generator", torch.Generator().manual_seed(1))
    settings.setdefault("implementation", "foreach")
    return CoVON(net.named_parameters(), **settings)


def means(net, optimizer) -> list[torch.Tensor]:
    return [optimizer.mean_of(p).clone() for p in net.parameters()]


@pytest.mark.parametrize("implementation", ["foreach", "reference", "auto"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_mean_is_that_of_float32_weights_bit_for_bit(settings, implementation):
    """So steps below the resolution of bfloat16 add up."""
    nets = model(torch.bfloat16), model(torch.float32)
    other = "foreach" if implementation == "auto" else implementation
    optimizers = [
        make(net, implementation=i, **settings)
        for net, i in zip(nets, (implementation, other), strict=True)
    ]
    for task in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, 4, first=10 * task)
        assert equal(means(nets[0], optimizers[0]), nets[1].parameters())
        assert equal(nets[0].parameters(), [p.bfloat16() for p in nets[1].parameters()])
        for optimizer in optimizers:
            optimizer.consolidate()
        half, full = (optimizer.posterior() for optimizer in optimizers)
        assert equal(half.mean.values(), full.mean.values())
        assert equal(half.precision.values(), full.precision.values())
        assert equal(nets[0].parameters(), [p.bfloat16() for p in nets[1].parameters()])


def test_a_sample_is_the_rounded_one_of_float32_weights():
    samples = {}
    for dtype in (torch.bfloat16, torch.float32):
        net = model(dtype)
        with make(net, lr=1e-3).sampled_params():
            samples[dtype] = [p.detach().clone() for p in net.parameters()]
    rounded = [sample.bfloat16() for sample in samples[torch.float32]]
    assert equal(samples[torch.bfloat16], rounded)


@pytest.mark.parametrize("noise", [1e-4, 0.02])
def test_noise_below_the_resolution_is_named(noise):
    net = nn.Linear(100, 100).bfloat16()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make(net, lr=1e-3, noise=noise).sampled_params():
            pass
    lost = [w for w in caught if "below the resolution of bfloat16: raise noise" in str(w.message)]
    assert len(lost) == (noise == 1e-4)


@pytest.mark.parametrize("at", ["within a task", "between tasks"])
def test_a_saved_state_goes_on_bit_for_bit(at, tmp_path):
    net = model(torch.bfloat16)
    optimizer = make(net, lr=1e-3)
    train(net, optimizer, 3)
    if at == "between tasks":
        optimizer.consolidate()
    torch.save((net.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    for order in ("model first", "optimizer first"):
        twin = model(torch.bfloat16)
        again = make(twin, lr=1e-3)
        weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
        if order == "model first":
            twin.load_state_dict(weights)
        again.load_state_dict(state)
        twin.load_state_dict(weights)
        train(twin, again, 3, first=50)
        if order == "model first":
            train(net, optimizer, 3, first=50)
        assert equal(means(twin, again), means(net, optimizer))


def test_weights_that_replace_those_of_a_loaded_state_are_the_mean():
    net = model(torch.bfloat16)
    optimizer = make(net, lr=1e-3)
    train(net, optimizer, 3)
    new = {name: torch.full_like(value, 0.25) for name, value in net.state_dict().items()}
    net.load_state_dict(new)
    with pytest.raises(RuntimeError, match="was replaced since the last step"):
        optimizer.sampled_params().__enter__()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    with optimizer.sampled_params():
        pass
    assert all((mean == 0.25).all() for mean in means(net, optimizer))


def test_copies_casts_priors_and_predictions():
    net = model(torch.bfloat16)
    optimizer = make(net, lr=1e-3)
    train(net, optimizer, 2)
    twin, copied = copy.deepcopy((net, optimizer))
    train(net, optimizer, 2, first=2)
    train(twin, copied, 2, first=2)
    assert equal(means(net, optimizer), means(twin, copied))
    optimizer.consolidate()
    with optimizer.sampled_params(train=False, temperature=4.0):
        assert not equal(net.parameters(), twin.parameters())
    prior = optimizer.posterior()
    other = model(torch.bfloat16)
    following = make(other, lr=1e-3, prior=DiagGaussian(prior.mean, prior.precision))
    assert equal(following.prior().mean.values(), prior.mean.values())
    net.float()  # goes on in float32
    train(net, optimizer, 2)
    assert all("mean" not in optimizer.state[p] for p in net.parameters())
    assert all(torch.isfinite(p).all() for p in net.parameters())
    net.bfloat16()
    train(net, optimizer, 2, first=2)
    assert all(optimizer.state[p]["mean"].dtype == torch.float32 for p in net.parameters())


def test_several_samples_and_the_estimate_of_the_paper_need_float32():
    with pytest.raises(ValueError, match=r"'0.weight' is torch.bfloat16, which needs mc_samples=1"):
        make(model(torch.bfloat16), lr=1e-3, mc_samples=2)
    with pytest.raises(ValueError, match="bfloat16 needs CoVON with hess_approx='gradsq'"):
        make(model(torch.bfloat16), lr=1e-3, hess_approx="reparam")
    net = model(torch.float32)
    optimizer = make(net, lr=1e-3, hess_approx="reparam")
    train(net, optimizer, 1)
    net.bfloat16()
    with pytest.raises(ValueError, match="bfloat16 needs CoVON with hess_approx='gradsq'"):
        optimizer.sampled_params().__enter__()
