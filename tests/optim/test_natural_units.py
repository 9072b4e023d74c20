"""Settings relative to the weights: against closed forms, numpy and AdamW."""

import copy
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from toy_optimizers import equal, nll, record_sample, same, step_on, train_step, train_task

from covon_avalanche import DiagGaussian
from covon_avalanche.optim import CoVON
from covon_avalanche.posterior import merge
from covon_avalanche.presets import FINETUNING, FROM_SCRATCH, REPARAM

PRESETS = {"scratch": CoVON, "finetuning": CoVON.finetuning}


def make(parameters, preset="finetuning", seed=0, lr=0.01, **settings) -> CoVON:
    generator = torch.Generator().manual_seed(seed)
    return PRESETS[preset](parameters, lr=lr, generator=generator, **settings)


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 3)).to(dtype)


def fresh(*arguments, dtype=torch.float32, **settings):
    """A network and its optimizer."""
    model = network(dtype)
    return model, make(model.named_parameters(), *arguments, **settings)


def task(seed: int, n: int = 48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=dtype)
    return x, torch.randint(3, (n,), generator=generator)


def rms(x) -> float:
    return float(x.detach().double().square().mean().sqrt())


# Noise and prior ------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_noise_and_the_prior_are_relative_to_each_tensor(preset):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(20_000) * scale) for scale in (0.02, 3.0)]
    optimizer = make(parameters, preset, noise=0.1, prior_width=0.5)
    prior = optimizer.prior()
    means = [p.detach().clone() for p in parameters]
    with optimizer.sampled_params():
        noises = [p.detach() - mean for p, mean in zip(parameters, means, strict=True)]
    for i, (mean, noise) in enumerate(zip(means, noises, strict=True)):
        assert rms(noise) == pytest.approx(0.1 * rms(mean), rel=0.02)
        width = torch.full_like(mean, (0.5 * rms(mean)) ** -2)
        torch.testing.assert_close(prior.precision[f"0.{i}"], width, rtol=1e-5, atol=0)
        centre = mean if preset == "finetuning" else torch.zeros_like(mean)
        assert prior.mean[f"0.{i}"].equal(centre)


def test_mini_batches_of_several_samples_count_like_one():
    """Their gradients are averaged, but not the squares that the Hessian has."""
    found = []
    for signs in ([1.0], [1.0, -1.0, 1.0, -1.0]):
        p = nn.Parameter(torch.ones(5))
        optimizer = make([p], mc_samples=len(signs), batch_size=8)
        for sign in signs:
            optimizer.zero_grad()
            with optimizer.sampled_params():
                (sign * p).sum().backward()
        optimizer.step()
        found.append(optimizer.param_groups[0]["ess_per_example"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-6, 9e-4])
def test_sizes_below_a_thousandth_count_as_a_hundredth(size):
    p = nn.Parameter(torch.full((20_000,), size))
    optimizer = make([p], noise=0.1, prior_width=0.5)
    with optimizer.sampled_params():
        assert rms(p - size) == pytest.approx(1e-3, rel=0.02)


def test_a_given_prior_is_kept_and_the_posterior_is_narrower():
    model = network()
    names = dict(model.named_parameters())
    mean = {name: torch.full_like(p, 0.3) for name, p in names.items()}
    precision = {name: torch.full_like(p, 1e6) for name, p in names.items()}
    optimizer = make(model.named_parameters(), prior=DiagGaussian(mean, precision))
    train_step(optimizer, model, task(0))
    assert optimizer.prior().mean["0.bias"].equal(mean["0.bias"])
    assert (optimizer.posterior().precision["0.weight"] > 1e6).all()


def test_groups_added_later_have_the_effective_sample_size_of_the_others():
    model = network()
    body, head = model[0], model[2]
    optimizer = make(head.parameters())
    train_step(optimizer, model, task(0))
    optimizer.param_groups[0]["examples"] = 50.0
    optimizer.add_param_group({"params": [*body.parameters()]})
    first, second = optimizer.param_groups
    assert first["ess_per_example"] == second["ess_per_example"] > 100
    assert second["examples"] == 50
    groups = [{"params": [*head.parameters()]}, {"params": [body.bias], "ess_per_example": 7.0}]
    optimizer = make(groups)
    assert [group["ess_per_example"] for group in optimizer.param_groups] == [7.0, 7.0]


def test_a_group_in_the_papers_units_keeps_its_hessian_when_the_size_of_others_is_set():
    found = []
    for given in (None, 5.0):  # by the first step of the group that is added, or by the user
        model = network()
        size = dict(ess=100.0, batch_size=48, generator=torch.Generator())
        optimizer = CoVON(model[0].parameters(), **size)
        train_step(optimizer, model, task(0))
        model.zero_grad()
        papers = dict(ess=None, hess_init=None, weight_decay=0.0, ess_per_example=given)
        natural = dict(noise=0.1, prior_width=5.0, data_precision=10.0)
        optimizer.add_param_group({"params": model[2].parameters(), **papers, **natural})
        train_step(optimizer, model, task(1))
        found.append(optimizer.state[model[0].weight]["hess"])
        assert optimizer.param_groups[0]["ess_per_example"] is None
    torch.testing.assert_close(*found)


def test_the_size_of_a_task_is_that_of_all_groups():
    model = network()
    groups = [{"params": [*model[i].parameters()], "lr": lr} for i, lr in ((0, 1e-3), (2, 1e-2))]
    optimizer = make(groups, examples=100)
    train_step(optimizer, model, task(0))
    optimizer.consolidate()
    optimizer.param_groups[0]["examples"] = 50
    with pytest.raises(ValueError, match=r"examples .* same in all groups, got 50 and 100: set it"):
        train_step(optimizer, model, task(1))
    optimizer.param_groups[1]["examples"] = 50
    train_step(optimizer, model, task(1))
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert optimizer.param_groups[2]["examples"] == 50


def test_a_prior_that_is_replaced_has_the_width_of_the_weights_before_the_task():
    p = nn.Parameter(torch.full((50,), 2.0))
    optimizer = make([p], noise=0.1, prior_width=0.5, lr=0.5, batch_size=1)
    for _ in range(20):
        step_on(optimizer, lambda: -1e-9 * p.sum())
    assert rms(p) > 4
    hess = optimizer.state[p]["hess"].clamp(min=0) * optimizer.param_groups[0]["ess_per_example"]
    expected = hess + (0.5 * 2.0) ** -2
    optimizer.consolidate("replace")
    torch.testing.assert_close(optimizer.posterior().precision["0.0"], expected)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 48}, {"hess_approx": "reparam"}])
def test_a_task_that_ends_without_a_batch_size_is_a_warning(settings, recwarn):
    model, optimizer = fresh(**settings)
    train_step(optimizer, model, task(0))
    optimizer.consolidate()
    said = "batch_size is not set" in str([w.message for w in recwarn])
    assert said == ("batch_size" not in settings)


def test_a_task_without_a_step_is_not_merged_and_raises_a_warning():
    """As with a loader that drops its only, incomplete batch."""
    model, optimizer = fresh(batch_size=48)
    train_task(optimizer, model, task(0))
    before = optimizer.posterior()
    with pytest.warns(UserWarning, match="no step was made since the last"):
        optimizer.consolidate()
    assert same(optimizer.posterior().precision, before.precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.consolidate("none")


# The step ---------------------------------------------------------------------------------


def test_the_first_step_of_every_tensor_has_the_length_of_the_learning_rate(implementation):
    """Whatever its gradients are; single weights move by lr * clip_radius at most."""
    for radius in (1.0, math.inf):
        model, optimizer = fresh(clip_radius=radius, implementation=implementation)
        before = copy.deepcopy(model)
        loss = nll(model, task(0))
        step_on(optimizer, lambda loss=loss: 1e-3 * loss())
        for new, old in zip(model.parameters(), before.parameters(), strict=True):
            change = (new - old).detach()
            if radius == 1.0:
                assert change.abs().max() <= 0.01 * (1 + 1e-5)
            else:
                assert rms(change) == pytest.approx(0.01, rel=1e-4)


def test_where_squared_gradients_dominate_steps_have_adams_direction(implementation):
    """That of Adam's moments of the very gradients, without its epsilon, in every tensor; but for
    the window of the first, which grows."""
    settings = dict(noise=1e-3, prior_width=1e-2, data_precision=1e9, betas=(0.9, 0.99))
    model, optimizer = fresh(**settings, clip_radius=math.inf, implementation=implementation)
    first = [torch.zeros_like(p) for p in model.parameters()]
    second = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(120):
        before = copy.deepcopy(model)
        record_sample(optimizer, nll(model, task(i)))
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        for m, v, grad, (new, old) in zip(first, second, grads, pairs, strict=True):
            m.lerp_(grad, max(0.1, 1 / (1 + i / 10)))
            v.lerp_(grad.square(), 0.01)
            adams = -(m / v.sqrt()).flatten()
            change = (new - old).detach().flatten()
            assert torch.cosine_similarity(change, adams, dim=0) > 0.999


def test_a_task_of_few_steps_does_not_overshoot(implementation):
    """With Adam's momentum it passes the minimum, three steps away, by about ten."""
    weight = nn.Parameter(torch.full((8,), 1.0))
    optimizer = make([weight], noise=1e-6, prior_width=1e-2, implementation=implementation)
    for _ in range(20):
        step_on(optimizer, lambda: (weight - 0.97).square().sum())
        assert weight.min() > 0.97 - 0.011
    assert (weight - 0.97).abs().max() < 0.011


@pytest.mark.parametrize("factor", [1e-14, 1e-18, 1e-21, 1e-23])
def test_a_task_that_is_learned_already_changes_nothing(implementation, factor):
    """Squares of its gradients, which are rounding errors, underflow in float32."""
    model, optimizer = fresh(batch_size=48, implementation=implementation)
    train_task(optimizer, model, task(0))
    before = copy.deepcopy(model)
    for _ in range(3):
        step_on(optimizer, lambda: factor * nll(model, task(1))())
    assert equal(model.parameters(), before.parameters())
    train_step(optimizer, model, task(1))
    assert all(p.isfinite().all() for p in model.parameters())
    assert not equal(model.parameters(), before.parameters())


def test_multiplying_the_loss_changes_only_the_pull_to_the_prior():
    """The effective sample size follows, and few steps hardly feel the pull."""

    def trained(factor, **settings):
        model, optimizer = fresh(**settings)
        for t in range(2):
            loss = nll(model, task(t))
            for _ in range(5):
                step_on(optimizer, lambda loss=loss: factor * loss())
            optimizer.consolidate()
        return optimizer.posterior()

    expected = trained(1.0)
    for other in (trained(1000.0), trained(1e-4), trained(1.0, batch_size=48)):
        for name, mean in expected.mean.items():
            torch.testing.assert_close(other.mean[name], mean, rtol=0.02, atol=5e-3)
            ratio = other.precision[name] / expected.precision[name]
            assert 0.8 < ratio.min() < ratio.max() < 1.25


def numpy_reference(start, gradients, noise, scales, ess, settings, approx):
    """A task of natural units, after the formulas of the module, for one tensor in float64."""
    m, m0, s0, lr, beta2 = start, *settings
    noise_scale, width = scales
    r = np.sqrt(np.mean(m**2))
    h = np.full_like(m, ((noise_scale * r) ** -2 - (width * r) ** -2) / ess)
    g, square = np.zeros_like(m), 0.0
    delta = s0 / ess
    for i, (gradient, e) in enumerate(zip(gradients, noise, strict=True), start=1):
        ghat = gradient(m + e / np.sqrt(ess * h + s0))
        hhat = ghat**2 if approx == "gradsq" else ghat * e * np.sqrt(ess * h + s0)
        g = g + (ghat - g) / min(10, 1 + (i - 1) / 10)
        retraction = 0.5 * (1 - beta2) ** 2 * (h - hhat) ** 2 / (h + delta)
        h = beta2 * h + (1 - beta2) * hhat + (retraction if approx == "reparam" else 0)
        square = 0.99 * square + 0.01 * np.mean(ghat**2 / (h + delta))
        raw = (g + delta * (m - m0)) / np.sqrt(h + delta)
        m = m - lr * np.clip(raw / np.sqrt(square / (1 - 0.99**i)), -2, 2)
    return m, s0 + ess * h


@pytest.mark.parametrize("approx", ["gradsq", "reparam"])
def test_two_tasks_match_numpy(approx):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2, 60))
    curvature = rng.uniform(0.5, 2, size=60)
    p = nn.Parameter(torch.tensor(rng.normal(size=60)))
    optimizer = make(
        [("w", p)], noise=0.1, prior_width=0.5, data_precision=100.0, hess_approx=approx,
        betas=(0.9, 0.99), clip_radius=2.0, implementation="reference",
    )  # fmt: skip
    m = p.detach().numpy().copy()
    r = np.sqrt(np.mean(m**2))
    m0, s0, ess = m, np.full(60, (0.5 * r) ** -2), None
    for t, centre in enumerate(centres):
        optimizer.param_groups[0]["examples"] = 100.0 * (t + 1)

        def gradient(theta, centre=centre):
            return curvature * (theta - centre)

        noise = []
        for _ in range(10):
            mean = p.detach().clone()
            std = optimizer._precision(p, optimizer.param_groups[0], True).rsqrt()
            target = torch.tensor(centre)
            with optimizer.sampled_params():
                noise.append(((p.detach() - mean) / std).numpy())
                optimizer.zero_grad()
                (0.5 * torch.tensor(curvature) * (p - target) ** 2).sum().backward()
            optimizer.step()
        if ess is None:
            first = gradient(m + noise[0] * 0.1 * r)
            ess = 100.0 / np.mean(first**2 * (0.1 * r) ** 2)
        gradients, settings = [gradient] * len(noise), (m0, s0, 0.01, 0.99)
        m, s = numpy_reference(m, gradients, noise, (0.1, 0.5), ess * (t + 1), settings, approx)
        optimizer.consolidate()
        prior, fast = ({"w": torch.tensor(x)} for x in (m0, m)), {"w": torch.tensor(s)}
        slow = DiagGaussian(next(prior), {"w": torch.tensor(s0)})
        merged = merge(slow, DiagGaussian(next(prior), fast), gamma=0.5)
        found = optimizer.posterior()
        torch.testing.assert_close(found.mean["w"], merged.mean["w"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.precision["w"], merged.precision["w"], rtol=1e-8, atol=0)
        m = m0 = merged.mean["w"].numpy()
        s0 = merged.precision["w"].numpy()


@pytest.mark.parametrize(
    ("approx", "dtype", "implementation", "tasks", "steps", "rtol", "atol"),
    [
        ("gradsq", torch.float64, "foreach", 3, 10, 1e-9, 2e-11),
        ("reparam", torch.float64, "foreach", 3, 10, 1e-9, 2e-11),
        ("gradsq", torch.float32, "compiled", 3, 10, 1e-3, 2e-5),
        ("reparam", torch.float32, "compiled", 1, 1, 1e-4, 1e-7),  # whose noise amplifies rounding
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_implementations_agree(preset, approx, dtype, implementation, tasks, steps, rtol, atol):
    found = []
    for kind in ("reference", implementation):
        model, optimizer = fresh(preset, dtype=dtype, hess_approx=approx, implementation=kind)
        for t in range(tasks):
            if t > 0:
                optimizer.consolidate()
            optimizer.param_groups[0]["examples"] = 10.0 * (t + 1)
            for _ in range(steps):
                train_step(optimizer, model, task(t, dtype=dtype))
        found.append(optimizer.posterior())
    expected, other = found
    for name, mean in expected.mean.items():
        torch.testing.assert_close(other.mean[name], mean, rtol=rtol, atol=atol)
        precision = expected.precision[name]
        torch.testing.assert_close(other.precision[name], precision, rtol=rtol, atol=0)


def test_several_samples_and_gradient_clipping_step_as_far():
    model, optimizer = fresh(mc_samples=3, clip_radius=math.inf)
    before = copy.deepcopy(model)
    for _ in range(3):
        record_sample(optimizer, nll(model, task(0)))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        assert rms(new - old) == pytest.approx(0.01, rel=1e-3)


# The effective sample size -------------------------------------------------------------------


def test_the_first_step_sets_the_effective_sample_size():
    """Its squared gradients add data_precision times the initial precision."""
    model, optimizer = fresh(data_precision=7.0, batch_size=48, examples=48)
    before = [rms(p) for p in model.parameters()]
    record_sample(optimizer, nll(model, task(0)))
    squares = [p.grad.double().square() for p in model.parameters()]
    optimizer.step()
    ess = optimizer.param_groups[0]["ess_per_example"] * 48
    pairs = zip(squares, before, strict=True)
    gained = sum(float((ess * 48 * square * (0.02 * r) ** 2).sum()) for square, r in pairs)
    assert gained / sum(s.numel() for s in squares) == pytest.approx(7.0, rel=1e-4)


def test_a_step_that_raises_does_not_set_it():
    for bad in (math.nan, math.inf):
        model, optimizer = fresh()
        record_sample(optimizer, nll(model, task(0)))
        model[0].bias.grad.fill_(bad)
        with pytest.raises(FloatingPointError, match=r"'0\.bias'"):
            optimizer.step()
        assert optimizer.param_groups[0]["ess_per_example"] is None
        assert not optimizer.state


def test_it_follows_the_examples_of_later_tasks_and_stays_within_one():
    model, optimizer = fresh(examples=48)
    train_task(optimizer, model, task(0))
    first = optimizer.param_groups[0]["ess_per_example"]
    added = []
    for examples in (48, 96):
        copied, twin = copy.deepcopy((model, optimizer))
        twin.param_groups[0]["examples"] = examples
        slow = twin.prior()
        train_step(twin, copied, task(1))
        fast = twin.posterior()
        added.append((fast.precision["0.weight"] - slow.precision["0.weight"]).double())
        assert twin.param_groups[0]["ess_per_example"] == first
    gained = (added[1] - added[0]).mean() / added[0].mean()  # only what the gradients added doubles
    assert 0 < gained < 1


def test_steps_without_gradients_neither_set_it_nor_move_anything():
    model, optimizer = fresh(examples=48)
    before = copy.deepcopy(model)
    step_on(optimizer, lambda: 0.0 * nll(model, task(0))())
    assert optimizer.param_groups[0]["ess_per_example"] is None
    assert equal(model.parameters(), before.parameters())
    precision = optimizer.posterior().precision["0.weight"].clone()
    train_step(optimizer, model, task(0))
    assert optimizer.param_groups[0]["ess_per_example"] > 1
    ratio = optimizer.posterior().precision["0.weight"] / precision
    assert 0.9 < ratio.min() < 100  # hess is in the new units


# State ------------------------------------------------------------------------------------


def test_a_state_in_the_papers_units_is_loaded_with_its_units():
    model = network()
    old = CoVON(model.named_parameters(), ess=48, batch_size=48)
    train_step(old, model, task(0))
    state = copy.deepcopy(old.state_dict())
    for group in state["param_groups"]:  # as earlier versions wrote it
        for key in ("noise", "prior_width", "data_precision", "examples", "ess_per_example"):
            del group[key]
    other, loaded = fresh()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    for net, own in ((model, old), (other, loaded)):
        train_task(own, net, task(0))
    assert equal(model.parameters(), other.parameters())


@pytest.mark.parametrize("half", [False, True])
def test_a_grown_parameter_keeps_its_state(half):
    small, large = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = make([small], "scratch", batch_size=1, bfloat16_prior=half)
    step_on(optimizer, lambda: (small**2).sum())
    optimizer.consolidate()
    step_on(optimizer, lambda: (small**2).sum())
    saved = optimizer.state[small]
    grown = make([large], "scratch", bfloat16_prior=half)
    grown.param_groups[0].update(ess_per_example=optimizer.param_groups[0]["ess_per_example"])
    grown.restore_state(large, saved)
    for key in ("hess", "prior_mean", "prior_precision"):
        assert grown.state[large][key].dtype == saved[key].dtype
        assert grown.state[large][key][:2].equal(saved[key])
    assert grown.state[large]["step_square"].equal(saved["step_square"])
    before = saved["step_square"].clone()
    step_on(grown, lambda: (large**2).sum())
    assert torch.isfinite(large).all()
    assert saved["step_square"].equal(before)  # several parameters may be restored from it


# Errors and warnings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(ess=100, noise=0.1), "one kind of units, got ess in the paper's and noise"),
        (dict(hess_init=0.1, noise=0.1), "got hess_init in the paper's and noise relative"),
        (dict(ess=100, examples=9), "ess sets the effective sample size: leave out examples"),
        (dict(ess=100, ess_per_example=2.0), "effective sample size: leave out ess_per_example"),
        (dict(hess_init=0.1, ess_per_example=-1), "ess_per_example must be > 0 .*got -1"),
        (dict(noise=0.5, prior_width=0.1), "noise must be smaller than prior_width, got 0.5"),
        (dict(weight_decay=0.1), "weight_decay=0.1 is the prior's precision"),
        (dict(noise=-1.0), "noise must be .*got -1"),
        (dict(data_precision=0.0), "data_precision must be .*got 0"),
        (dict(examples=0), "examples must be .*got 0"),
        (dict(ess_per_example=math.nan), "ess_per_example must be .*got nan"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CoVON(network().named_parameters(), **settings)


def test_the_papers_settings_written_into_a_group_are_named():
    for name in ("ess", "hess_init"):
        model, optimizer = fresh()
        optimizer.param_groups[0][name] = 100.0
        with pytest.raises(ValueError, match=f"{name}=100.0 has the paper's units, but noise=0.02"):
            train_step(optimizer, model, task(0))


def test_groups_without_weight_decay_and_with_learning_rates_of_their_own():
    model = network()
    matrices = {"params": [model[0].weight, model[2].weight], "lr": 0.1}
    biases = {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0}
    optimizer = CoVON.finetuning([matrices, biases], lr=0.01)
    before = copy.deepcopy(model)
    train_step(optimizer, model, task(0))
    assert 0.05 < (model[0].weight - before[0].weight).abs().max() <= 0.2001
    assert 0.005 < (model[0].bias - before[0].bias).abs().max() <= 0.02001


def test_noise_larger_than_the_weights_is_a_warning_that_names_the_setting():
    papers, relative = dict(ess=48, batch_size=48), dict(noise=2.0)
    for advice, options in (("raise ess, or leave it out", papers), ("lower noise", relative)):
        optimizer = CoVON(network().named_parameters(), **options)
        with (
            pytest.warns(UserWarning, match=f"times as large as the weights.* {advice}$"),
            optimizer.sampled_params(),
        ):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in PRESETS:
            with make(network().named_parameters(), preset).sampled_params():
                pass


def test_presets_are_what_the_constructors_use():
    group = CoVON(network().parameters()).param_groups[0]
    assert {key: group[key] for key in FROM_SCRATCH} == FROM_SCRATCH
    group = CoVON.finetuning(network().parameters(), lr=1e-5).param_groups[0]
    assert {key: group[key] for key in FINETUNING} == FINETUNING
    assert CoVON.finetuning(network().parameters(), lr=1, gamma=0.4).param_groups[0]["gamma"] == 0.4
    for make_one in (CoVON, partial(CoVON.finetuning, lr=1e-5)):
        group = make_one(network().parameters(), hess_approx="reparam").param_groups[0]
        assert {key: group[key] for key in REPARAM} == REPARAM
        given = make_one(network().parameters(), hess_approx="reparam", data_precision=0.1)
        assert given.param_groups[0]["data_precision"] == 0.1
