"""The ways to compute CoVON's step, against ``fast_step`` and against each other."""

import copy
import math
from unittest import mock

import pytest
import torch
from step_args import RATES, largest_error, make_args
from torch import nn
from toy_optimizers import make_covon, train_step, weights

from covon_avalanche.optim import CoVON, implementations, noise
from covon_avalanche.optim.checks import DeferredCheck
from covon_avalanche.optim.implementations import draw_samples, step

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13}
EACH = pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])
FAST = pytest.mark.parametrize("implementation", ["foreach", "compiled"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", ["tensors", "numbers", "centre"])
@FAST
def test_a_step_is_fast_step(implementation, dtype, prior):
    """Small, odd and large tensors in one call; sizes around the kernel's groups and tiles."""
    for squared in (False, True):
        for mc_samples in (1, 2):
            args, kind = make_args(dtype, prior), dict(squared=squared, mc_samples=mc_samples)
            assert largest_error(args, implementation, **kind) < TOLERANCE[dtype], kind


@pytest.mark.parametrize("prior", ["tensors", "numbers"])
@FAST
def test_each_parameter_has_its_own_rates_and_prior(implementation, prior):
    """Alternating, so that neighbours never share them; and without clipping or momentum."""
    args = make_args(torch.float64 if implementation == "foreach" else torch.float32, prior)
    for i, a in enumerate(args):
        rates = RATES._replace(
            ess=30.0 + i, lr=0.1 * (i % 2), beta1=0.8 - i / 10, rest2=0.01 * (i + 1)
        )
        if i == 2:
            rates = rates._replace(beta1=0.0, correction=1.0)
        if i == 3:
            rates = rates._replace(clip_radius=math.inf)
        args[i] = a._replace(rates=rates)
        if prior == "numbers":
            args[i] = args[i]._replace(prior_precision=10.0 ** (i % 3))
    for squared in (False, True):
        error = largest_error(args, implementation, squared=squared, mc_samples=1)
        assert error < TOLERANCE[args[0].mean.dtype]


@FAST
def test_priors_of_zero_next_to_tensors(implementation):
    """As of groups with ``prior_mean="init"`` and ``"zero"``, or of new parameters beside trained
    ones with ``weight_decay=0``."""
    for order in (1, -1):
        args = [
            make_args(torch.float32, prior, sizes=(40, 50))[i]
            for i, prior in enumerate(("centre", "numbers"))
        ]
        zeros = [args[0]._replace(prior_precision=torch.ones(40)), args[1]]
        zeros[1] = zeros[1]._replace(prior_precision=0.0)
        for some in (args, zeros):
            assert draw_samples(some[::order], 3, implementation) == set()
            error = largest_error(some[::order], implementation, squared=False, mc_samples=1)
            assert error < TOLERANCE[torch.float32]


def test_small_buckets_change_nothing():
    runs = []
    for most in (implementations._MOST_ENTRIES, 1500):
        args = make_args(torch.float32, "tensors")
        with mock.patch.object(implementations, "_MOST_ENTRIES", most):
            buckets = [[a.number for a in b] for b in implementations._buckets(args)]
            assert draw_samples(args, 8, "foreach") == set()
            assert largest_error(args, "foreach", squared=False, mc_samples=1) < 2e-5
        runs.append([a.mean for a in args])
    assert buckets == [[0, 1, 2], [3], [4], [5], [6], [7]]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_draw_the_same_samples_from_the_posterior(dtype):
    """Whatever the order, with ``hess`` as tensors or, before a task's first step, a number."""
    for prior in ("tensors", "numbers"):
        one, other = make_args(dtype, prior), make_args(dtype, prior)[::-1]
        if prior == "numbers":
            one, other = ([a._replace(hess=0.3) for a in args] for args in (one, other))
        key = 2**64 - 9
        assert draw_samples(one, key, "compiled") == draw_samples(other, key, "foreach") == set()
        for a, b in zip(one, reversed(other), strict=True):
            torch.testing.assert_close(a.sample, b.sample)
            z = noise.fill_normal_(torch.empty_like(a.mean), key, a.number)
            want = a.mean + z * (60.0 * torch.as_tensor(a.hess) + a.prior_precision) ** -0.5
            torch.testing.assert_close(a.sample, want)


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


@pytest.mark.parametrize("place", [0, -1])
@FAST
def test_precisions_that_are_not_positive_are_found(implementation, place):
    args = make_args(torch.float32, "numbers")
    args[2].hess[place] = args[-1].hess[place] = -1.0
    assert draw_samples(args, 0, implementation) == {2, len(args) - 1}


@pytest.mark.parametrize(("squared", "largest"), [(True, 2e5), (False, 9e8)])
@FAST
def test_a_step_that_might_overflow_is_not_made(implementation, squared, largest):
    rates = RATES._replace(batch_size=1e3)
    kind = dict(squared=squared, deferred=DeferredCheck())

    def made(gradient=0.0, statistic=0.0, mc_samples=1):
        """Whether the step was made; where it was not, nothing has changed."""
        args = make_args(torch.float32, "tensors", rates=rates)
        args[3].grad[1], args[3].sample[1] = gradient, statistic
        before = [[t.clone() for t in (a.mean, a.momentum, a.hess)] for a in args]
        done = step(args, implementation, mc_samples=mc_samples, **kind)
        pairs = zip(before, [(a.mean, a.momentum, a.hess) for a in args], strict=True)
        same = [torch.equal(x, y) for old, new in pairs for x, y in zip(old, new, strict=True)]
        assert not any(same) if done else all(same)
        return done

    assert made(largest)
    for unsafe in (10 * largest, -10 * largest, math.inf, math.nan):
        assert not made(unsafe)
    assert made(statistic=1e12)
    assert made(statistic=1e12, mc_samples=2)
    assert not made(statistic=1e16, mc_samples=2)


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


@FAST
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
    with mock.patch.object(noise, "compiled_fill", return_value=None):
        train_step(make_covon(linear.parameters()), linear, batch)  # "auto" does without
        optimizer = make_covon(linear.parameters(), implementation="compiled")
        with pytest.raises(ValueError, match="'compiled' needs a working numba on a CPU"):
            train_step(optimizer, linear, batch)
