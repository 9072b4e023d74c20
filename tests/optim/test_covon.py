"""CoVON against closed forms, Algorithm 1 in numpy and ivon-opt; its slow step; its settings."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from toy_optimizers import (
    Antithetic,
    exact_posterior,
    given_noise,
    make_covon,
    regression_step,
    regression_task,
    same,
    train_step,
    weights,
)

from covon_avalanche.optim import CoVON
from covon_avalanche.posterior.gaussian import DiagGaussian, merge


class AntitheticCoVON(Antithetic, CoVON):
    """Exact expectations for quadratic losses."""


@pytest.mark.parametrize("implementation", ["reference", "foreach"])
def test_conjugate_regression_gives_the_exact_sequential_posterior(implementation):
    """gamma = 1: after each of three tasks mean and precision are those of Bayes' rule."""
    tasks = [regression_task(seed) for seed in range(3)]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = AntitheticCoVON(
        model.parameters(),
        implementation=implementation,
        ess=64,
        lr=0.2,
        hess_init=1.0,
        betas=(0.0, 0.9),
        weight_decay=0.05,
        gamma=1.0,
        mc_samples=2,
        hess_approx="reparam",
        generator=torch.Generator().manual_seed(0),
    )
    for task, (mean, precision) in zip(tasks, exact_posterior(tasks, 0.05), strict=True):
        for _ in range(260):
            regression_step(optimizer, model, *task)
        optimizer.consolidate()
        posterior = optimizer.posterior(model.named_parameters())
        torch.testing.assert_close(posterior.mean["weight"][0], mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(posterior.precision["weight"][0], precision, rtol=1e-8, atol=0)
        assert torch.equal(model.weight.detach(), posterior.mean["weight"])


def test_conjugate_regression_with_real_noise_stays_within_its_sampling_error():
    """One Gaussian sample a step: the same posterior, up to the error of the averages.

    At the fixed point h has bias (1 - beta2) * h (the retraction term, Var(e²) = 2) and
    variance (1 - beta2) / 2 * Var(estimate); the bound is bias plus five deviations.
    """
    task = regression_task(3)
    (mean, precision) = next(iter(exact_posterior([task], 0.05)))
    x, y, noise = task
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    beta2 = 0.998
    optimizer = make_covon(
        model.parameters(), ess=64, hess_init=5.0, betas=(0.9, beta2), weight_decay=0.05, gamma=1.0
    )
    for step in range(3500):
        optimizer.param_groups[0]["lr"] = 0.2 if step < 1000 else 0.01
        regression_step(optimizer, model, x.float(), y.float(), noise)
    posterior = optimizer.posterior(model.named_parameters())
    h = (precision - 64 * 0.05) / 64
    # The estimate is h e² + g e / sigma, with g the loss gradient at the mean, which balances
    # the prior's pull; the mean's own jitter adds less than lr * h².
    pull = (0.05 * mean).square() * precision
    variance = (2 + 0.01) * h.square() + pull
    bound = (1 - beta2) * variance / h + 5 * ((1 - beta2) / 2 * variance).sqrt()
    error = (posterior.precision["weight"][0] - precision) / 64
    assert (error.abs() < bound).all()
    assert (bound < 0.5 * h).all()  # the bound says something
    deviation = (posterior.mean["weight"][0] - mean) * precision.sqrt()
    assert deviation.abs().max() < 1.0  # well inside the posterior


def numpy_algorithm_1(theta0, tasks, noise, steps, options):
    """Algorithm 1 line by line, float64, softmax regression; noise as drawn by torch."""
    m = theta0.astype(np.float64)
    m0, s = np.zeros_like(m), np.full_like(m, options["ess"][0] * options["weight_decay"])
    history = []
    draws = iter(noise)
    for t, (x, y) in enumerate(tasks):
        ess = options["ess"][t]
        g, h = np.zeros_like(m), np.full_like(m, options["hess_init"][t])
        for i in range(1, steps + 1):
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
            g = b1 * g + (1 - b1) * grad
            d = s / ess
            h = b2 * h + (1 - b2) * hess + 0.5 * (1 - b2) ** 2 * (h - hess) ** 2 / (h + d)
            direction = (g / (1 - b1**i) + d * (m - m0)) / (h + d)
            m = m - options["lr"] * np.clip(direction, -options["clip"], options["clip"])
        gamma = options["gamma"]
        s1 = (1 - gamma) * s + gamma * (s + ess * h)
        m = ((1 - gamma) * s * m0 + gamma * (s + ess * h) * m) / s1
        m0, s = m, s1
        history.append((m, s))
    return history


@pytest.mark.parametrize(
    ("hess_approx", "mc_samples", "clip"),
    [("reparam", 1, float("inf")), ("reparam", 3, 0.05), ("gradsq", 1, 0.05), ("gradsq", 2, 0.5)],
)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", torch.float64),
        ("foreach", torch.float64),
        ("reference", torch.float32),
        ("foreach", torch.float32),
        ("compiled", torch.float32),
    ],
)
def test_three_tasks_match_the_float64_reference(
    implementation, dtype, hess_approx, mc_samples, clip
):
    """Every implementation, with whatever noise it draws, against Algorithm 1 in numpy."""
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    rng = np.random.default_rng(0)
    tasks = [(rng.normal(size=(32, 5)), rng.integers(4, size=32)) for _ in range(3)]
    options = dict(
        ess=[50.0, 80.0, 60.0],
        hess_init=[0.3, 0.2, 0.1],
        weight_decay=0.02,
        betas=(0.9, 0.95),
        lr=0.1,
        clip=clip,
        gamma=0.7,
        mc_samples=mc_samples,
        hess_approx=hess_approx,
    )
    steps = 30
    torch.manual_seed(1)
    model = nn.Linear(5, 4, bias=False).to(dtype)
    theta0 = model.weight.detach().numpy().copy()
    optimizer = CoVON(
        model.named_parameters(),
        ess=50.0,
        lr=0.1,
        hess_init=0.3,
        betas=(0.9, 0.95),
        weight_decay=0.02,
        gamma=0.7,
        gamma_precision=None,
        clip_radius=clip,
        mc_samples=mc_samples,
        hess_approx=hess_approx,
        batch_size=32,
        generator=torch.Generator().manual_seed(5),
        implementation=implementation,
    )
    noise, posteriors = [], []
    for t, (x, y) in enumerate(tasks):
        optimizer.param_groups[0].update(ess=options["ess"][t], hess_init=options["hess_init"][t])
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y)
        s0 = posteriors[-1].precision["weight"].double() if t else 50.0 * 0.02
        for _ in range(steps):
            hess = optimizer.state.get(model.weight, {}).get("hess", torch.tensor(0.0)).double()
            hess = hess if hess.dim() else options["hess_init"][t]
            std = (options["ess"][t] * hess + s0) ** -0.5
            for _ in range(mc_samples):
                mean = model.weight.detach().double().clone()
                with optimizer.sampled_params():
                    noise.append(((model.weight.detach().double() - mean) / std).numpy())
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate()
        posteriors.append(optimizer.posterior())
    reference = numpy_algorithm_1(theta0, tasks, noise, steps, options)
    assert 0.93 < np.std(noise) < 1.07
    for posterior, (mean, precision) in zip(posteriors, reference, strict=True):
        error = posterior.mean["weight"].double() - torch.tensor(mean)
        assert error.abs().max() < rtol * np.abs(mean).max()
        relative = posterior.precision["weight"].double() / torch.tensor(precision) - 1
        assert relative.abs().max() < rtol


@pytest.mark.parametrize("implementation", ["reference", "foreach"])
def test_the_first_task_follows_ivon_opt_with_the_same_noise(implementation):
    ivon = pytest.importorskip("ivon", reason="the optional peer ivon-opt is not installed")
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(20, 6).double(), torch.randint(3, (20,))
    shared = dict(lr=0.1, ess=200.0, hess_init=0.25, weight_decay=1e-2, clip_radius=0.5)
    own = dict(betas=(0.9, 0.99), hess_approx="reparam", implementation=implementation)
    a = CoVON(ours.parameters(), **own, **shared)
    b = ivon.IVON(theirs.parameters(), beta1=0.9, beta2=0.99, rescale_lr=False, **shared)
    noise = []
    for step in range(100):  # ivon-opt draws one vector, parameter by parameter
        flat = torch.randn(21, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        noise += [flat[:18].view(3, 6), flat[18:]]
    with given_noise(noise):
        for step in range(100):
            for model, optimizer in ((ours, a), (theirs, b)):
                torch.manual_seed(step)
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-9, atol=1e-11)


def test_hess_may_be_negative_but_hess_plus_prior_stays_positive():
    """A concave loss: the estimate is negative in expectation."""
    weight = nn.Parameter(torch.zeros(200))
    optimizer = make_covon([weight], hess_init=0.01, lr=1e-3, weight_decay=0.5, betas=(0.9, 0.9))
    for _ in range(200):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (-0.2 * weight.square()).sum().backward()
        optimizer.step()
        hess = optimizer.state[weight]["hess"]
        assert (hess + 0.5 > 0).all()
    assert (hess < 0).float().mean() > 0.5


def test_consolidate_is_merge_of_the_tasks_posterior_into_the_prior(linear, batch):
    """Over two tasks, against the pure function; the first prior takes part."""
    optimizer = make_covon(linear.named_parameters())
    prior = DiagGaussian(
        {n: torch.zeros_like(p) for n, p in linear.named_parameters()},
        {n: torch.full_like(p, 100.0 * 0.01) for n, p in linear.named_parameters()},
    )
    for gamma in (0.7, 0.3):
        for _ in range(20):
            train_step(optimizer, linear, batch)
        fast = optimizer.posterior()
        optimizer.consolidate(gamma=gamma)
        slow = optimizer.posterior()
        prior = merge(prior, fast, gamma)
        torch.testing.assert_close(dict(slow.mean), {n: m.detach() for n, m in prior.mean.items()})
        torch.testing.assert_close(dict(slow.precision), dict(prior.precision))
        for name, p in linear.named_parameters():
            assert torch.equal(p, slow.mean[name])


def test_gamma_one_keeps_the_weights_and_a_small_gamma_keeps_the_prior(linear, batch):
    optimizer = make_covon(linear.named_parameters())
    for _ in range(10):
        train_step(optimizer, linear, batch)
    before = {n: p.detach().clone() for n, p in linear.named_parameters()}
    optimizer.consolidate(gamma=1.0)
    assert all(torch.equal(p, before[n]) for n, p in linear.named_parameters())
    for _ in range(10):
        train_step(optimizer, linear, batch)
    optimizer.consolidate(gamma=1e-6)
    for name, p in linear.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=1e-4, atol=1e-4)


def test_init_centres_the_first_prior_at_the_starting_weights(batch):
    """With an overwhelming prior the weights stay where it is centred."""
    for centre in ("init", "zero"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        start = model.weight.detach().clone()
        optimizer = make_covon(
            model.parameters(), prior_mean=centre, weight_decay=1e4, lr=0.5, hess_init=1.0
        )
        for _ in range(60):
            train_step(optimizer, model, batch)
        optimizer.consolidate()
        expected = start if centre == "init" else torch.zeros_like(start)
        torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=2e-3)


def test_debias_corrects_the_start_of_the_gradient_average(batch):
    """First step: with debias the direction is the gradient's, without a tenth of it."""
    moves = {}
    for debias in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)
        start = model.weight.detach().clone()
        optimizer = make_covon(model.parameters(), debias=debias, weight_decay=0.0)
        x, y = batch
        with optimizer.sampled_params():
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        moves[debias] = model.weight.detach() - start
    torch.testing.assert_close(moves[False], 0.1 * moves[True], rtol=1e-4, atol=1e-7)


class TestHessianEstimates:
    @pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])
    def test_squared_gradients_of_any_size_that_float32_can_hold(self, implementation):
        """Large ones are checked before anything is changed; too large ones are refused."""
        for gradient in (1e3, 1e6, 1e8):
            p = nn.Parameter(torch.zeros(5))
            optimizer = make_covon(
                [p],
                hess_approx="gradsq",
                batch_size=8,
                implementation=implementation,
                betas=(0.9, 0.75),
            )
            with optimizer.sampled_params():
                (gradient * p).sum().backward()
            optimizer.step()
            change = 0.25 * (8 * gradient**2 - 0.5)
            expected = 0.5 + change + 0.5 * change**2 / (0.5 + 0.01)
            torch.testing.assert_close(optimizer.state[p]["hess"], torch.full((5,), expected))
        before = p.detach().clone()
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (1e18 * p).sum().backward()
        with pytest.raises(FloatingPointError, match="not finite"):
            optimizer.step()
        assert torch.equal(before, p)

    def test_gradsq_needs_a_batch_size_before_the_first_forward_pass(self, linear, batch):
        for mc_samples in (1, 2):
            optimizer = CoVON(linear.parameters(), ess=10, mc_samples=mc_samples)
            with pytest.raises(ValueError, match=r"'gradsq' needs .*: pass batch_size="):
                optimizer.sampled_params().__enter__()
            with optimizer.sampled_params(train=False):
                pass
            optimizer.param_groups[0]["batch_size"] = 16  # as CoVONPlugin does
            train_step(optimizer, linear, batch)

    def test_a_group_may_come_later_without_a_batch_size(self, linear, batch):
        optimizer = make_covon([linear.weight], hess_approx="gradsq", batch_size=16)
        optimizer.param_groups[0]["batch_size"] = 8
        optimizer.add_param_group({"params": [linear.bias]})
        train_step(optimizer, linear, batch)
        assert optimizer.hess_approx == "gradsq"


class TestSlowStep:
    @pytest.mark.parametrize("kind", ["ema", "replace", "none"])
    def test_the_ablations_of_figure_2b(self, linear, batch, kind):
        optimizer = make_covon(linear.parameters(), consolidation=kind, gamma=0.7)
        for _ in range(2):
            for _ in range(3):
                train_step(optimizer, linear, batch)
            m, old = linear.weight.detach().clone(), dict(optimizer.state[linear.weight])
            old = {k: v.clone() if torch.is_tensor(v) else v for k, v in old.items()}
            optimizer.consolidate()
        state, mean = optimizer.state[linear.weight], linear.weight.detach()
        if kind == "ema":  # averages means without the precision
            torch.testing.assert_close(mean, 0.3 * old["prior_mean"] + 0.7 * m)
            precision = old["prior_precision"] + 0.7 * 100 * old["hess"]
            torch.testing.assert_close(state["prior_precision"], precision)
        elif kind == "replace":  # keeps the last task alone
            torch.testing.assert_close(mean, m)
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
            (dict(hess_approx="gradsq", consolidation="ema"), 0.7),
            (dict(hess_approx="gradsq", gamma_precision=3.0), 3.0),
            (dict(hess_approx="reparam"), 0.7),
        ],
    )
    def test_auto_keeps_twice_the_precision_of_estimates_that_are_never_negative(
        self, linear, batch, options, factor
    ):
        optimizer = make_covon(linear.parameters(), batch_size=16, **options)
        for _ in range(3):
            train_step(optimizer, linear, batch)
        hess = optimizer.state[linear.weight]["hess"].clone()
        optimizer.consolidate()
        expected = 100.0 * 0.01 + factor * 100.0 * hess
        torch.testing.assert_close(optimizer.state[linear.weight]["prior_precision"], expected)

    def test_what_is_no_gaussian_changes_nothing(self, linear, batch):
        """A negative Hessian times a large ``gamma_precision``, and means that do not fit."""
        optimizer = make_covon(linear.named_parameters())
        train_step(optimizer, linear, batch)
        optimizer.state[linear.bias]["hess"].fill_(-0.005)
        before, state = weights(linear), dict(optimizer.state[linear.weight])
        for options, says in (
            (dict(gamma_precision=5.0), "precision of 'bias' must be positive"),
            (dict(gamma=-1.0), "gamma must be > 0"),
            (dict(means={linear.bias: torch.zeros(4)}), r"'bias' must have shape \(3,\)"),
            (dict(means={linear.bias: torch.full((3,), torch.nan)}), "'bias' is not finite"),
        ):
            with pytest.raises(ValueError, match=says):
                optimizer.consolidate(**options)
            assert same(weights(linear), before)
            assert all(optimizer.state[linear.weight][k] is v for k, v in state.items())
        optimizer.consolidate(means={linear.bias: torch.arange(3.0)})
        assert linear.bias.tolist() == [0, 1, 2]

    def test_state_is_lazy_and_leaves_only_the_prior_between_tasks(self, linear, batch):
        optimizer = make_covon(linear.parameters())
        assert not optimizer.state
        train_step(optimizer, linear, batch)
        assert set(optimizer.state[linear.weight]) == {"step", "momentum", "hess"}
        optimizer.consolidate()
        assert set(optimizer.state[linear.weight]) == {"prior_mean", "prior_precision"}

    def test_a_saved_posterior_is_continued_exactly(self, tmp_path, linear, batch):
        """Save after a task, load into a fresh optimizer: the next task goes the same way."""
        optimizer = make_covon(linear.named_parameters())
        for _ in range(5):
            train_step(optimizer, linear, batch)
        optimizer.consolidate()
        optimizer.posterior().save(tmp_path / "slow.safetensors")
        model = copy.deepcopy(linear)
        prior = DiagGaussian.load(tmp_path / "slow.safetensors")
        fresh = make_covon(model.named_parameters(), prior=prior)
        for key in ("noise_seed", "noise_draws"):
            fresh.param_groups[0][key] = optimizer.param_groups[0][key]
        for m, o in ((linear, optimizer), (model, fresh)):
            for _ in range(5):
                train_step(o, m, batch)
            o.consolidate()
        assert same(weights(linear), weights(model))
        assert same(optimizer.posterior().precision, fresh.posterior().precision)

    def test_the_prior_seen_inside_a_sample_is_the_one_outside(self, linear, batch):
        optimizer = make_covon(linear.named_parameters(), prior_mean="init")
        for _ in range(2):
            before = optimizer.prior()
            with optimizer.sampled_params():
                assert same(optimizer.prior().mean, before.mean)
            train_step(optimizer, linear, batch)


def test_a_torch_optimizer_for_schedulers_and_groups(linear, batch):
    optimizer = CoVON([linear.weight], ess=10, lr=0.05, batch_size=16)
    optimizer.add_param_group({"params": [linear.bias], "lr": 0.5})
    assert optimizer.param_groups[1]["ess"] == 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    train_step(optimizer, linear, batch)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.005, 0.05])


EACH = pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])


@pytest.mark.parametrize("change", [{}, {"mc_samples": 2}, {"hess_approx": "gradsq"}])
def test_a_seed_gives_the_same_run_by_each(linear, batch, change):
    runs = {}
    for implementation in ("reference", "foreach", "compiled"):
        model = copy.deepcopy(linear)
        optimizer = make_covon(
            model.parameters(), implementation=implementation, batch_size=16, **change
        )
        for i in range(20):
            train_step(optimizer, model, batch)
            if i == 9:
                optimizer.consolidate()
        runs[implementation] = weights(model)
    for implementation in ("foreach", "compiled"):
        for name, value in runs["reference"].items():
            torch.testing.assert_close(runs[implementation][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@EACH
def test_float64_and_float32_parameters_in_one_optimizer(implementation, hess_approx):
    wide, narrow = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(5))
    options = dict(implementation=implementation, hess_approx=hess_approx, batch_size=4)
    optimizer = make_covon([narrow, wide], hess_init=5.0, **options)
    for _ in range(3):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (wide.square().sum() + narrow.square().sum()).backward()
        optimizer.step()
    assert (wide < 1).all()
    assert (narrow < 1).all()
    assert optimizer.state[wide]["hess"].dtype == torch.float64


@EACH
def test_a_backward_pass_through_weights_that_a_step_has_changed_is_an_error(
    linear, implementation
):
    optimizer = make_covon(linear.parameters(), implementation=implementation)
    with optimizer.sampled_params():
        linear(torch.ones(2, 4)).square().sum().backward()
    loss = linear(torch.ones(2, 4, requires_grad=True)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("implementation", ["foreach", "compiled"])
def test_parameters_without_gradients_do_not_change_the_others(batch, implementation):
    """As the heads of other tasks: they are drawn, but not stepped. The noise goes by
    number, so they come last."""
    runs = []
    for others in (0, 3):
        torch.manual_seed(0)
        model, more = nn.Linear(4, 3), [nn.Linear(4, 3) for _ in range(others)]
        parameters = [p for m in (model, *more) for p in m.parameters()]
        optimizer = make_covon(parameters, implementation=implementation)
        for _ in range(3):
            train_step(optimizer, model, batch)
        runs.append(weights(model))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_unknown_or_impossible_implementations_are_refused(linear, batch):
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'fastest'"):
        CoVON(linear.parameters(), ess=10, implementation="fastest")
    with mock.patch("covon_avalanche.optim.covon.compiled_fill", return_value=None):
        train_step(make_covon(linear.parameters()), linear, batch)  # "auto" does without
        optimizer = make_covon(linear.parameters(), implementation="compiled")
        with pytest.raises(ValueError, match="'compiled' needs a working numba on a CPU"):
            train_step(optimizer, linear, batch)
