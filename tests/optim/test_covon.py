"""CoVON against closed forms, Algorithm 1 in numpy and ivon-opt; its slow step."""

import copy
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from toy_optimizers import (
    Antithetic,
    contents,
    exact_posterior,
    given_noise,
    make_covon,
    nll,
    regression_step,
    regression_task,
    same,
    step_on,
    train_step,
    train_task,
    unchanged,
)

from covon_avalanche.optim import CoVON, multi_tensor
from covon_avalanche.posterior.gaussian import DiagGaussian


class AntitheticCoVON(Antithetic, CoVON):
    """Exact expectations for quadratic losses."""


def test_conjugate_regression_gives_the_exact_sequential_posterior():
    """gamma = 1: after each of three tasks mean and precision are those of Bayes' rule."""
    tasks = [regression_task(seed) for seed in range(3)]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    options = dict(ess=64, lr=0.2, hess_init=1.0, betas=(0.0, 0.8), weight_decay=0.05, gamma=1.0)
    options |= dict(mc_samples=2, hess_approx="reparam", clip_radius=float("inf"))
    options |= dict(generator=torch.Generator().manual_seed(0), implementation="reference")
    optimizer = AntitheticCoVON(model.parameters(), **options)
    for task, (mean, precision) in zip(tasks, exact_posterior(tasks, 0.05), strict=True):
        for _ in range(130):
            regression_step(optimizer, model, *task)
        optimizer.consolidate()
        posterior = optimizer.posterior(model.named_parameters())
        torch.testing.assert_close(posterior.mean["weight"][0], mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(posterior.precision["weight"][0], precision, rtol=1e-8, atol=0)
        assert torch.equal(model.weight.detach(), posterior.mean["weight"])


DTYPES = torch.float64, torch.float32
ESS, HESS_INIT, GAMMA = (50.0, 80.0, 60.0), (0.3, 0.2, 0.1), (0.7, 0.3, 1.0)
STEPS = 10
COMMON = dict(lr=0.1, weight_decay=0.02, betas=(0.9, 0.95), clip_radius=0.05)
COMMON |= dict(mc_samples=1, prior_mean="zero", hess_approx="gradsq", batch_size=32)


def numpy_algorithm_1(theta0, tasks, noise, options):
    """Algorithm 1 line by line, float64, softmax regression; the noise is given."""
    m = theta0.astype(np.float64)
    s = np.full_like(m, ESS[0] * options["weight_decay"])
    m0 = m if options["prior_mean"] == "init" else np.zeros_like(m)
    history = []
    draws = iter(noise)
    for (x, y), ess, hess_init, gamma in zip(tasks, ESS, HESS_INIT, GAMMA, strict=True):
        g, h = np.zeros_like(m), np.full_like(m, hess_init)
        for i in range(1, STEPS + 1):
            variance = 1 / (ess * h + s)
            grads, hessians = [], []
            for _ in range(options["mc_samples"]):
                theta = m + np.sqrt(variance) * next(draws)
                logits = x @ theta.T
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                p[np.arange(len(y)), y] -= 1
                grad = p.T @ x / len(y)
                grads.append(grad)
                signed = options["hess_approx"] == "reparam"
                hessians.append(grad * (theta - m) / variance if signed else len(y) * grad**2)
            grad, hess = np.mean(grads, 0), np.mean(hessians, 0)
            b1, b2 = options["betas"]
            if b2 is None:
                b2 = 1 - 1 / (50 + (i - 1) / 10)
            g = b1 * g + (1 - b1) * grad
            d = s / ess
            h = b2 * h + (1 - b2) * hess + 0.5 * (1 - b2) ** 2 * (h - hess) ** 2 / (h + d)
            direction, clip = (g / (1 - b1**i) + d * (m - m0)) / (h + d), options["clip_radius"]
            m = m - options["lr"] * np.clip(direction, -clip, clip)
        s1 = (1 - gamma) * s + gamma * (s + ess * h)
        m = ((1 - gamma) * s * m0 + gamma * (s + ess * h) * m) / s1
        m0, s = m, s1
        history.append((m, s))
    return history


@pytest.mark.parametrize(
    "case",
    [
        dict(hess_approx="reparam", clip_radius=float("inf")),
        dict(hess_approx="reparam", mc_samples=3, prior_mean="init"),
        dict(betas=(0.9, None), prior_mean="init"),
        dict(betas=(0.9, None), mc_samples=2, clip_radius=0.5),
    ],
)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*itertools.product(("reference", "foreach"), DTYPES), ("compiled", torch.float32)],
)
def test_three_tasks_match_the_float64_reference(implementation, dtype, case):
    """Every implementation, with whatever noise it draws, against Algorithm 1 in numpy."""
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    rng = np.random.default_rng(0)
    tasks = [(rng.normal(size=(32, 5)), rng.integers(4, size=32)) for _ in range(3)]
    options = {**COMMON, **case}
    torch.manual_seed(1)
    model = nn.Linear(5, 4, bias=False).to(dtype)
    theta0 = model.weight.detach().numpy().copy()
    own = dict(gamma_precision=None, generator=torch.Generator().manual_seed(5))
    first = dict(ess=ESS[0], hess_init=HESS_INIT[0], implementation=implementation)
    optimizer = CoVON(model.named_parameters(), **first, **own, **options)
    noise, posteriors = [], []
    for t, (x, y) in enumerate(tasks):
        optimizer.param_groups[0].update(ess=ESS[t], hess_init=HESS_INIT[t], gamma=GAMMA[t])
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y)
        s0 = posteriors[-1].precision["weight"].double() if t else ESS[0] * COMMON["weight_decay"]
        start = torch.tensor(HESS_INIT[t], dtype=torch.float64)
        for _ in range(STEPS):
            hess = optimizer.state.get(model.weight, {}).get("hess", start).double()
            std = (ESS[t] * hess + s0) ** -0.5
            for _ in range(options["mc_samples"]):
                mean = model.weight.detach().double().clone()
                with optimizer.sampled_params():
                    noise.append(((model.weight.detach().double() - mean) / std).numpy())
                    optimizer.zero_grad()
                    nll(model, (x, y))().backward()
            optimizer.step()
        optimizer.consolidate()
        posteriors.append(optimizer.posterior())
        assert torch.equal(model.weight, posteriors[-1].mean["weight"])
    reference = numpy_algorithm_1(theta0, tasks, noise, options)
    assert 0.93 < np.std(noise) < 1.07
    for posterior, (mean, precision) in zip(posteriors, reference, strict=True):
        error = posterior.mean["weight"].double() - torch.tensor(mean)
        assert error.abs().max() < rtol * np.abs(mean).max()
        relative = posterior.precision["weight"].double() / torch.tensor(precision) - 1
        assert relative.abs().max() < rtol


def test_the_first_task_follows_ivon_opt_with_the_same_noise():
    ivon = pytest.importorskip("ivon", reason="the optional peer ivon-opt is not installed")
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(20, 6).double(), torch.randint(3, (20,))
    shared = dict(lr=0.1, ess=200.0, hess_init=0.25, weight_decay=1e-2, clip_radius=0.5)
    own = dict(betas=(0.9, 0.99), hess_approx="reparam", implementation="reference")
    a = CoVON(ours.parameters(), **own, **shared)
    b = ivon.IVON(theirs.parameters(), beta1=0.9, beta2=0.99, rescale_lr=False, **shared)
    noise = []
    for step in range(30):  # ivon-opt draws one vector, parameter by parameter
        flat = torch.randn(21, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        noise += [flat[:18].view(3, 6), flat[18:]]
    with given_noise(noise):
        for step in range(30):
            for model, optimizer in ((ours, a), (theirs, b)):
                torch.manual_seed(step)
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    nll(model, (x, y))().backward()
                optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-9, atol=1e-11)


def test_hess_may_be_negative_but_hess_plus_prior_stays_positive():
    """A concave loss: the estimate is negative in expectation."""
    weight = nn.Parameter(torch.zeros(200))
    optimizer = make_covon([weight], hess_init=0.01, lr=1e-3, weight_decay=0.5, betas=(0.9, 0.9))
    for _ in range(200):
        step_on(optimizer, lambda: (-0.2 * weight.square()).sum())
        hess = optimizer.state[weight]["hess"]
        assert (hess + 0.5 > 0).all()
    assert (hess < 0).float().mean() > 0.5


def test_squared_gradients_of_any_size_that_float32_can_hold(implementation):
    """Large ones are checked before anything is changed; too large ones are refused."""
    options = dict(implementation=implementation, hess_approx="gradsq")
    for gradient in (1e3, 1e6, 1e8):
        p = nn.Parameter(torch.zeros(5))
        optimizer = make_covon([p], betas=(0.9, 0.75), batch_size=8, **options)
        step_on(optimizer, lambda: (gradient * p).sum())  # noqa: B023
        change = 0.25 * (8 * gradient**2 - 0.5)
        expected = 0.5 + change + 0.5 * change**2 / (0.5 + 0.01)
        torch.testing.assert_close(optimizer.state[p]["hess"], torch.full((5,), expected))
    for batch_size, *large in ((8, 1e18), (8, -1e18), (8, 1e18, -1e18), (1e8, 1e8)):
        optimizer = make_covon([p], mc_samples=len(large), batch_size=batch_size, **options)
        gradients = iter(large)
        with unchanged(optimizer), pytest.raises(FloatingPointError, match="not finite"):
            step_on(optimizer, lambda: (next(gradients) * p).sum())  # noqa: B023


def test_gradsq_needs_a_batch_size_before_the_first_forward_pass(linear, batch):
    for mc_samples in (1, 2):
        optimizer = CoVON([linear.weight], ess=10, mc_samples=mc_samples)
        with pytest.raises(ValueError, match=r"'gradsq' needs .*: pass batch_size="):
            optimizer.sampled_params().__enter__()
        with optimizer.sampled_params(train=False):
            pass
        optimizer.param_groups[0]["batch_size"] = 16  # as CoVONPlugin does
        optimizer.add_param_group({"params": [linear.bias]})  # of which none is needed
        train_step(optimizer, linear, batch)


class TestSlowStep:
    @pytest.mark.parametrize("kind", ["replace", "none"])
    def test_the_ablations_of_figure_2b(self, linear, batch, kind):
        """``test_averaging`` has the third, EMA."""
        optimizer = make_covon(linear.parameters(), gamma=0.7)
        for step in range(6):
            if step == 3:
                optimizer.consolidate(merge=kind)
            train_step(optimizer, linear, batch)
        m, old = linear.weight.detach().clone(), dict(optimizer.state[linear.weight])
        optimizer.consolidate(merge=kind)
        state = optimizer.state[linear.weight]
        if kind == "replace":  # keeps the last task alone
            assert torch.equal(linear.weight, m)
            precision = 100 * old["hess"].clamp(min=0) + 1.0
            torch.testing.assert_close(state["prior_precision"], precision)
        else:  # one long task
            assert state["step"] == 6
            assert "prior_mean" not in state

    @pytest.mark.parametrize(
        ("options", "factor"),
        [
            (dict(hess_approx="gradsq"), 2.0),
            (dict(hess_approx="gradsq", gamma_precision=None), 0.7),
            (dict(hess_approx="gradsq", gamma_precision=3.0), 3.0),
            (dict(hess_approx="reparam"), 0.7),
        ],
    )
    def test_auto_doubles_estimates_that_are_never_negative(self, linear, batch, options, factor):
        optimizer = make_covon(linear.parameters(), batch_size=16, **options)
        assert (optimizer.param_groups[0]["gamma_precision"] or 0.7) == factor
        train_step(optimizer, linear, batch)
        hess = optimizer.state[linear.weight]["hess"].clone()
        optimizer.consolidate()
        expected = 100.0 * 0.01 + factor * 100.0 * hess
        torch.testing.assert_close(optimizer.state[linear.weight]["prior_precision"], expected)

    def test_what_is_no_gaussian_changes_nothing(self, linear, batch):
        """A negative Hessian times a large ``gamma_precision``, and means that do not fit."""
        optimizer = make_covon(linear.named_parameters(), gamma_precision=5.0)
        train_step(optimizer, linear, batch)
        optimizer.state[linear.bias]["hess"].fill_(-0.005)
        for options, says in (
            (dict(), "precision of 'bias' must be positive"),
            (dict(merge="ema"), "merge must be one of 'eq8', 'replace', 'none', got 'ema'"),
            (dict(means={linear.bias: torch.zeros(4)}), r"'bias' must have shape \(3,\)"),
            (dict(means={linear.bias: torch.full((3,), torch.nan)}), "'bias' is not finite"),
            (dict(means={"bias": torch.zeros(3)}), "means must have parameters as keys.*'bias'"),
        ):
            with unchanged(optimizer), pytest.raises(ValueError, match=says):
                optimizer.consolidate(**options)
            optimizer.param_groups[0]["gamma_precision"] = 0.5
        optimizer.param_groups[0]["gamma"] = -1.0
        with unchanged(optimizer), pytest.raises(ValueError, match="gamma must be > 0"):
            optimizer.consolidate()
        optimizer.param_groups[0]["gamma"] = 0.5
        optimizer.param_groups[0]["lr"] = -1e-9  # after the end of a schedule
        optimizer.consolidate(means={linear.bias: torch.arange(3.0)})
        assert linear.bias.tolist() == [0, 1, 2]

    def test_a_saved_posterior_is_continued_exactly(self, tmp_path, linear, batch):
        """Save after a task, load into a fresh optimizer: the next task goes the same way."""
        optimizer = make_covon(linear.named_parameters())
        train_task(optimizer, linear, batch)
        optimizer.posterior().save(tmp_path / "slow.safetensors")
        model = copy.deepcopy(linear)
        prior = DiagGaussian.load(tmp_path / "slow.safetensors")
        fresh = make_covon(model.named_parameters(), prior=prior)
        for key in ("noise_seed", "noise_draws"):
            fresh.param_groups[0][key] = optimizer.param_groups[0][key]
        for m, o in ((linear, optimizer), (model, fresh)):
            train_task(o, m, batch)
        assert same(contents(optimizer), contents(fresh))


def test_unknown_or_impossible_implementations_are_refused(linear, batch, monkeypatch):
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'fastest'"):
        CoVON(linear.parameters(), ess=10, implementation="fastest")
    for module in ("covon", "samples"):
        monkeypatch.setattr(f"covon_avalanche.optim.{module}.compiled_kernel", lambda: None)
    train_step(make_covon(linear.parameters()), linear, batch)  # "auto" does without
    optimizer = make_covon(linear.parameters(), implementation="compiled")
    with pytest.raises(ValueError, match="'compiled' needs a working numba on a CPU"):
        train_step(optimizer, linear, batch)


def allocated(work):
    """Bytes by which the allocations of ``work`` grew at their end, and at their peak."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events, stack = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    totals = list(itertools.accumulate((size for _, size in sorted(events)), initial=0))
    return totals[-1], max(totals)


class TestMemory:
    def test_multi_tensor_operations_cast_only_a_bucket_to_float32(self, monkeypatch):
        layers = [nn.Parameter(torch.randn(600, 600).bfloat16()) for _ in range(9)]
        monkeypatch.setattr(multi_tensor, "_LARGEST_PART_CPU", 600**2)
        own = {"bfloat16_prior": True, "implementation": "foreach"}
        optimizer = CoVON.finetuning(layers, lr=1e-4, batch_size=32, **own)

        def iteration():
            with optimizer.sampled_params():
                for p in layers:
                    p.grad = torch.full_like(p, 1e-3)
            optimizer.step()

        iteration()
        optimizer.consolidate()
        iteration()
        held, peak = allocated(iteration)
        assert peak - held < 7 * 4 * 600**2  # temporaries, gradient and prior of a layer

    @pytest.mark.parametrize(("implementation", "transient"), [("compiled", 0), ("foreach", 3)])
    def test_what_is_held_and_what_a_step_needs(self, implementation, transient, monkeypatch):
        """The temporaries of multi-tensor operations are those of one bucket."""
        layers, layer = [nn.Parameter(torch.randn(600, 600)) for _ in range(3)], 4 * 600**2
        gradients = [torch.randn_like(p) / 1000 for p in layers]
        monkeypatch.setattr(multi_tensor, "_LARGEST_PART_CPU", layer // 4)
        optimizer = CoVON(layers, ess=1e4, batch_size=32, implementation=implementation)

        def iteration():
            with optimizer.sampled_params():
                for p, grad in zip(layers, gradients, strict=True):
                    p.grad = grad  # as a backward pass would leave it
            optimizer.step()

        for _ in range(2):
            held, peak = allocated(iteration)  # momentum, hess, sample
            assert held == pytest.approx(9 * layer, rel=0.01)
            assert peak < held + (transient + 2.1) * layer  # hess_init as a tensor
            for _ in range(2):  # later steps hold nothing more
                held, peak = allocated(iteration)
                assert abs(held) < 0.1 * layer
                assert peak < (transient + 0.1) * layer
            optimizer.consolidate()

    @pytest.mark.parametrize("mc_samples", [1, 2])
    def test_gradients_are_not_held_beyond_the_step(self, implementation, mc_samples):
        p = nn.Parameter(torch.ones(400))
        optimizer = make_covon([p], mc_samples=mc_samples, implementation=implementation)
        for _ in range(2):
            step_on(optimizer, lambda: p.square().sum())
        gradient = weakref.ref(p.grad)
        optimizer.zero_grad()
        gc.collect()
        assert gradient() is None


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_weight_decay_may_be_any_kind_of_number(number):
    found = []
    for implementation in ("auto", "foreach", "reference"):
        for decay in (0.5, number(0.5)):
            p = nn.Parameter(torch.ones(8))
            optimizer = make_covon([p], weight_decay=decay, implementation=implementation)
            step_on(optimizer, lambda: p.square().sum())  # noqa: B023
            found.append(p.detach())
    for other in found:
        torch.testing.assert_close(other, found[0])
