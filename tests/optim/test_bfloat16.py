"""CoVON with weights or a prior in bfloat16: the same arithmetic on float32 means, no drift."""

import copy

import pytest
import torch
from torch import nn
from toy_optimizers import contents, equal, in_a_task, step_on, train

from covon_avalanche import CoVON, DiagGaussian
from covon_avalanche.optim import covon, samples
from covon_avalanche.posterior.gaussian import merge_tensors

RESOLUTION = 2**-7  # the largest distance of neighbours, relative to them
PRIOR = ("prior_mean", "prior_precision")
SETTINGS = {
    "natural units": dict(lr=1e-3),
    "pretrained": dict(lr=1e-3, prior_mean="init", noise=0.02, prior_width=0.1),
    "paper's units": dict(lr=0.05, ess=1e5, batch_size=8, prior_mean="init"),
}


def model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 50), nn.LayerNorm(50), nn.Linear(50, 3))
    return made.bfloat16().to(dtype)  # the same values


def make(net, seed=1, **settings) -> CoVON:
    settings = {"generator": torch.Generator().manual_seed(seed), "lr": 1e-3} | settings
    return CoVON(net.named_parameters(), **settings)


def means(net, optimizer) -> list[torch.Tensor]:
    return [optimizer.mean_of(p).clone() for p in net.parameters()]


# Weights ----------------------------------------------------------------------------------------


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
        with make(net).sampled_params():
            samples[dtype] = [p.detach().clone() for p in net.parameters()]
    rounded = [sample.bfloat16() for sample in samples[torch.float32]]
    assert equal(samples[torch.bfloat16], rounded)


@pytest.mark.parametrize("noise", [1e-4, 0.02])
def test_noise_below_the_resolution_is_named(noise, recwarn):
    net = nn.Linear(100, 100).bfloat16()
    with make(net, noise=noise).sampled_params():
        pass
    lost = [w for w in recwarn if "below the resolution of bfloat16: raise noise" in str(w.message)]
    assert len(lost) == (noise == 1e-4)


def test_changes_of_a_single_weight_by_its_resolution_are_noticed():
    """Although their sum is the same in bfloat16."""
    net = nn.Linear(16, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    optimizer = make(net, lr=0.0)
    train(net, optimizer, 1)
    with torch.no_grad():
        net.weight[0, 0] += 2**-7
        net.weight.mul_(1.0)
    assert optimizer.changed_weights() == ["weight"]


@pytest.mark.parametrize("then", ["sample", "consolidate"])
def test_weights_that_replace_those_of_a_loaded_state_are_the_mean(then):
    net = model(torch.bfloat16)
    optimizer = make(net, gamma=1.0)
    train(net, optimizer, 3)
    new = {name: torch.full_like(value, 0.75) for name, value in net.state_dict().items()}
    net.load_state_dict(new)
    with pytest.raises(RuntimeError, match="was replaced since the last step"):
        optimizer.sampled_params().__enter__()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    if then == "consolidate":  # as with averaged weights at the end of a task
        net[0].requires_grad_(False)
        optimizer.consolidate()
    else:
        with optimizer.sampled_params():
            pass
    assert all((mean == 0.75).all() for mean in means(net, optimizer))


def test_casts_priors_and_predictions():
    net = model(torch.bfloat16)
    optimizer = make(net)
    train(net, optimizer, 4)
    optimizer.consolidate()
    before = copy.deepcopy(net)
    with optimizer.sampled_params(train=False, temperature=4.0):
        assert not equal(net.parameters(), before.parameters())
    prior = optimizer.posterior()
    other = model(torch.bfloat16)
    following = make(other, prior=DiagGaussian(prior.mean, prior.precision))
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
        make(model(torch.bfloat16), mc_samples=2)
    with pytest.raises(ValueError, match="bfloat16 needs CoVON with hess_approx='gradsq'"):
        make(model(torch.bfloat16), hess_approx="reparam")
    net = model(torch.float32)
    optimizer = make(net, hess_approx="reparam")
    train(net, optimizer, 1)
    net.bfloat16()
    with pytest.raises(ValueError, match="bfloat16 needs CoVON with hess_approx='gradsq'"):
        optimizer.sampled_params().__enter__()


# Prior ------------------------------------------------------------------------------------------


def rounded(values, key, number) -> torch.Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    samples.copy_rounded_(out, values, key, number)
    return out


@pytest.mark.parametrize("compiled", [True, False])
def test_rounding_is_to_a_neighbour_and_has_no_bias(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(samples, "compiled_kernel", lambda: None)
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).exp() * 1e-3
    values[::2] *= -1
    many = values.repeat(5000, 1)
    found = rounded(many, 3, 4)
    assert torch.equal(found, rounded(many, 3, 4))
    assert not torch.equal(found, rounded(many, 3, 5))
    assert torch.equal(found, rounded(many.double(), 3, 4))
    assert ((found.float() - many) / many).abs().max() < RESOLUTION
    assert found.unique(dim=0).shape[0] > 4900  # rows are independent
    below = values.sign() * (values.abs().view(torch.int32) >> 16 << 16).view(torch.float32)
    above = values.sign() * ((values.abs().view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    up = found.float() == above
    assert (up | (found.float() == below)).all()
    expected = (values - below) / (above - below)
    standard_error = (expected * (1 - expected) / 5000).sqrt()
    assert ((up.float().mean(0) - expected).abs() < 5 * standard_error + 1e-3).all()
    exact = values.bfloat16().float()
    assert torch.equal(rounded(exact, 3, 4).float(), exact)


@pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])
@pytest.mark.parametrize("options", [{}, {"hess_approx": "gradsq"}], ids=["reparam", "gradsq"])
def test_a_step_is_that_with_a_float32_prior_of_the_same_values(implementation, options):
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        optimizer = in_a_task(implementation, torch.float32, **options)
        params = [group["params"][0] for group in optimizer.param_groups]
        for p in params:
            for key in PRIOR:
                value = optimizer.state[p][key]
                optimizer.state[p][key] = value.bfloat16().to(dtype)
        for _ in range(2):
            step_on(optimizer, lambda: sum(p.square().sum() for p in params))  # noqa: B023
        assert all(optimizer.state[p][key].dtype == dtype for p in params for key in PRIOR)
        state = contents(optimizer)
        found.append([state[key].float() for key in sorted(state)])
    assert equal(*found)


@pytest.mark.parametrize("implementation", ["reference", "foreach", "auto"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_task_and_a_merge_agree_with_float32(settings, implementation):
    nets = model(), model()
    optimizers = [
        make(net, implementation=implementation, bfloat16_prior=half, **settings)
        for net, half in zip(nets, (True, False), strict=True)
    ]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 5)
    p = nets[0][0].weight
    state, group = optimizers[0].state[p], optimizers[0].param_groups[0]
    assert state["prior_mean"].dtype == torch.bfloat16
    prior = [optimizers[0].prior().mean["0.weight"], optimizers[0].prior().precision["0.weight"]]
    assert prior[0].dtype == prior[1].dtype == torch.float32
    exact = [x.double() for x in (*prior, p, optimizers[0].posterior().precision["0.weight"])]
    mean, precision = merge_tensors(*exact, group["gamma"], group["gamma_precision"])
    for optimizer in optimizers:
        optimizer.consolidate()
    state = optimizers[0].state[p]
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    torch.testing.assert_close(p.double(), mean, rtol=1e-5, atol=1e-7)  # not rounded
    assert ((state["prior_mean"] - mean) / mean).abs().max() < RESOLUTION
    assert ((state["prior_precision"] - precision) / precision).abs().max() < RESOLUTION
    ours, theirs = (optimizer.posterior() for optimizer in optimizers)
    for field in ("mean", "precision"):
        for name, value in getattr(ours, field).items():
            assert value.dtype == torch.float32
            expected = getattr(theirs, field)[name]
            atol = 0.1 * RESOLUTION * expected.abs().mean().item()  # of means near zero
            torch.testing.assert_close(value, expected, rtol=2 * RESOLUTION, atol=atol)


@pytest.mark.parametrize("rounding", ["at random", "nearest"])
def test_many_small_merges_do_not_drift(rounding, monkeypatch):
    """Each of 20 tasks moves the mean by less than half of the distance of neighbours."""
    if rounding == "nearest":
        monkeypatch.setattr(covon, "copy_rounded_", lambda out, values, *_: out.copy_(values))
    start, ends, far = torch.linspace(1.0, 1.9, 20_000), [], 20
    for half in (True, False):
        p = nn.Parameter(start.clone())
        settings = dict(ess=1e4, hess_init=1.0, gamma=0.5, batch_size=1, clip_radius=1.0)
        optimizer = make(nn.ParameterList([p]), bfloat16_prior=half, **settings)
        for _ in range(far):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                p.grad = torch.full_like(p, -5.0)
            optimizer.step()
            optimizer.consolidate()
        ends.append(p.detach())
    error, travelled = (ends[0] - ends[1]) / start, (ends[1] - start).abs() / start
    assert 1e-4 < travelled.mean() / far < 2e-3
    if rounding == "at random":
        assert error.mean().abs() < 0.02 * travelled.mean()
        assert error.square().mean().sqrt() < RESOLUTION
    else:
        assert error.mean().abs() > 0.2 * travelled.mean()


def test_states_of_float32_priors_go_on_with_the_option():
    net = model()
    optimizer = make(net)
    train(net, optimizer, 2)
    optimizer.consolidate()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["bfloat16_prior"]  # as in a checkpoint of an earlier version
    twin = make(net, bfloat16_prior=True)
    twin.load_state_dict(state)
    p = next(net.parameters())
    assert twin.state[p]["prior_mean"].dtype == torch.float32
    train(net, twin, 2)
    twin.consolidate()
    assert twin.state[p]["prior_mean"].dtype == torch.bfloat16


def test_predictions_given_means_and_saved_gaussians(tmp_path):
    net = model()
    optimizer = make(net, bfloat16_prior=True)
    train(net, optimizer, 2)
    given = {p: torch.full_like(p, 0.3) for p in net.parameters()}
    optimizer.consolidate(means=given)
    assert all((p == torch.tensor(0.3)).all() for p in net.parameters())
    kept = torch.cat([optimizer.state[p]["prior_mean"].flatten() for p in net.parameters()])
    assert sorted(kept.unique().tolist()) == [0.298828125, 0.30078125]
    with torch.no_grad(), optimizer.sampled_params(train=False):
        assert not equal(net.parameters(), given.values())
    optimizer.posterior().save(tmp_path / "q.safetensors")
    saved = DiagGaussian.load(tmp_path / "q.safetensors")
    assert {v.dtype for v in saved.precision.values()} == {torch.float32}
    following = make(model(), bfloat16_prior=True, prior=saved)
    p = next(iter(following.state))
    assert {value.dtype for value in following.state[p].values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("dtype", "half"),
    [*((d, True) for d in (torch.float32, torch.float64, torch.bfloat16)), (torch.bfloat16, False)],
)
@pytest.mark.parametrize("at", ["within a task", "between tasks"])
def test_a_saved_state_or_a_copy_goes_on_bit_for_bit(dtype, half, at, tmp_path):
    net = model(dtype)
    optimizer = make(net, bfloat16_prior=half)
    for task in range(2):
        train(net, optimizer, 3, first=10 * task)
        if task == 0 or at == "between tasks":
            optimizer.consolidate()
    torch.save((net.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    pairs = [(net, optimizer)]
    for order in ("model first", "optimizer first"):
        twin = model(dtype)
        again = make(twin, seed=2)  # the saved setting counts
        weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
        if order == "model first":
            twin.load_state_dict(weights)
        again.load_state_dict(state)
        twin.load_state_dict(weights)
        pairs.append((twin, again))
    found = []
    for a, b in (*pairs, copy.deepcopy((net, optimizer))):
        p = next(a.parameters())
        assert {b.state[p][key].dtype == torch.bfloat16 for key in PRIOR} == {half}
        train(a, b, 3, first=50)
        b.consolidate()
        found.append([v.float() for v in contents(b).values()])
    for other in found[1:]:
        assert equal(found[0], other)
