"""Multi-tensor operations and the CPU kernel against ``fast_step``; the check of gradients that
does not wait for the device."""

import math
import shutil
from unittest import mock

import pytest
import torch
from step_args import RATES, draw, largest_error, make_args, step
from torch import nn
from toy_optimizers import make_covon

from covon_avalanche.optim import multi_tensor, samples
from covon_avalanche.optim.multi_tensor import DeferredCheck

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13}
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
            ess=30.0 + i, lr=0.1 * (i % 2), beta1=0.8 - i / 10, one_minus_beta2=0.01 * (i + 1)
        )
        if i == 2:
            rates = rates._replace(beta1=0.0, bias_correction=1.0)
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
            assert draw(some[::order], implementation)
            error = largest_error(some[::order], implementation, squared=False, mc_samples=1)
            assert error < TOLERANCE[torch.float32]


def test_small_buckets_change_nothing():
    runs = []
    for most in (multi_tensor._LARGEST_BUCKET_CPU, 1500):
        args = make_args(torch.float32, "tensors")
        with mock.patch.object(multi_tensor, "_LARGEST_BUCKET_CPU", most):
            buckets = [[a.number for a in b] for b in multi_tensor._buckets(args)]
            assert draw(args, "foreach")
            assert largest_error(args, "foreach", squared=False, mc_samples=1) < 2e-5
        runs.append([a.mean for a in args])
    assert buckets == [[0, 1, 2], [3], [4], [5], [6], [7]]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", ["tensors", "numbers"])
def test_both_draw_the_same_samples_from_the_posterior_in_any_order(dtype, prior):
    key = 2**64 - 9
    one, other = make_args(dtype, prior), make_args(dtype, prior)[::-1]
    assert draw(one, "compiled", key)
    assert draw(other, "foreach", key)
    for a, b in zip(one, reversed(other), strict=True):
        torch.testing.assert_close(a.sample, b.sample)
        z = samples.fill_normal_(torch.empty_like(a.mean), key, a.number)
        want = a.mean + z * (60.0 * a.hess + a.prior_precision) ** -0.5
        torch.testing.assert_close(a.sample, want)


@pytest.mark.parametrize("place", [0, -1])
@FAST
def test_a_precision_that_is_not_positive_is_found(implementation, place):
    args = make_args(torch.float32, "numbers")
    assert draw(args, implementation)
    args[2].hess[place] = -1.0
    assert not draw(args, implementation)


@FAST
def test_a_step_with_too_large_gradients_is_not_made(implementation):
    def made(gradient=0.0, statistic=0.0, mc_samples=1):
        """Whether the step was made; where it was not, nothing has changed."""
        args = make_args(torch.float32, "tensors")
        args[3].grad[1], args[3].sample[1] = gradient, statistic
        before = contents(args)
        done = step(args, implementation, squared=True, mc_samples=mc_samples, limit=1e6)
        same = list(map(torch.equal, contents(args), before))
        assert not any(same) if done else all(same)
        return done

    assert made(9e5)
    for unsafe in (1.1e6, -1.1e6, math.inf, math.nan):
        assert not made(unsafe)
    assert made(statistic=1e12)
    assert made(statistic=1e12, mc_samples=2)
    assert not made(statistic=1e16, mc_samples=2)


def columns(args):
    """Means to prior precisions, as ``multi_tensor.update`` takes them."""
    fields = ("mean", "grad", "sample", "momentum", "hess", "prior_mean", "prior_precision")
    return [multi_tensor._column(args, field) for field in fields]


def contents(args):
    return [t.clone() for a in args for t in (a.mean, a.momentum, a.hess)]


@pytest.mark.parametrize("squared", [False, True])
def test_where_finite_is_false_nothing_changes_bit_by_bit(squared):
    """Even if gradients, statistics and what follows from them are NaN."""
    args, plain = (make_args(torch.float32, "tensors", sizes=(5, 70)) for _ in range(2))
    before = contents(args)
    for bad in (torch.nan, torch.inf, 1e30):
        args[1].grad[3], args[0].sample[0] = bad, bad
        table = columns(args)
        if squared:
            table[2] = None
        multi_tensor.update(*table, squared=squared, finite=torch.tensor(False), **RATES._asdict())
        assert all(map(torch.equal, contents(args), before))
    args = make_args(torch.float32, "tensors", sizes=(5, 70))
    for some, finite in ((args, torch.tensor(True)), (plain, None)):
        multi_tensor.update(*columns(some), squared=squared, finite=finite, **RATES._asdict())
    assert all(map(torch.equal, contents(args), contents(plain)))
    assert not any(map(torch.equal, contents(args), before))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_by_torch_it_does_the_same_and_is_compiled_once():
    """Rates change with each step, and must not be compiled in."""
    args, plain = (make_args(torch.float32, "tensors", sizes=(3,)) for _ in range(2))
    run = multi_tensor.compiled_update()
    for i, stance in enumerate(("default", "fail_on_recompile", "fail_on_recompile")):
        rates = RATES._replace(
            ess=50.0 + i,
            lr=0.1 / (i + 1),
            one_minus_beta2=0.02 + i / 100,
            bias_correction=1 / (1 + i),
            batch_size=4 + i,
        )._asdict()
        multi_tensor.update(*columns(plain), squared=False, **rates)
        constant = {key: rates.pop(key) for key in ("beta1", "clip_radius")}
        rates = {key: torch.tensor(float(value)) for key, value in rates.items()}
        finite = torch.tensor(i < 2)
        before = contents(args)
        with torch.compiler.set_stance(stance):
            run(*columns(args), squared=False, finite=finite, **constant, **rates)
        want = contents(plain) if i < 2 else before
        for got, expected in zip(contents(args), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class Event:
    """Of a device that has not finished until told so."""

    done = False
    waited = 0

    def __init__(self, device):
        pass

    def record(self):
        pass

    def query(self):
        return Event.done

    def synchronize(self):
        Event.waited += 1


@pytest.fixture
def event(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "done", False)
    monkeypatch.setattr(Event, "waited", 0)
    return Event


def deferred(*bad):
    """Four steps with two parameters each; the second's gradient is bad in some."""
    check = DeferredCheck()
    for i in range(1, 5):
        fit = check.add(["a", "b"], i, torch.tensor([True, i not in bad]))
        assert fit.item() == (i not in bad)
    return check


def test_a_bad_gradient_is_named_once_the_device_has_finished(event):
    check = deferred(2)
    check.raise_if_bad(wait=False)
    assert event.waited == 0
    event.done = True
    with pytest.raises(FloatingPointError, match=r"gradient of 'b' is not .* in step 2 of"):
        check.raise_if_bad(wait=False)
    check.raise_if_bad(wait=False)  # once


def test_waiting_for_the_device_raises_the_first_bad_gradient(event):
    check = deferred(3, 4)
    with pytest.raises(FloatingPointError, match=r"'b' .* in step 3"):
        check.raise_if_bad(wait=True)
    assert event.waited == 3
    check.raise_if_bad(wait=True)  # steps after it are forgotten
    assert event.waited == 3


def test_good_steps_are_forgotten(event):
    check = deferred()
    event.done = True
    check.raise_if_bad(wait=False)
    event.done = False
    check.raise_if_bad(wait=True)
    assert event.waited == 0


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize("when", ["later step", "consolidate", "state_dict"])
def test_an_accelerator_skips_a_bad_step_and_a_later_call_raises(event, when, hess_approx):
    def state():
        entries = optimizer.state[p]
        return [t.clone() for t in (p.detach(), entries["momentum"], entries["hess"])]

    def step(scale=1.0):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (scale * (p - 3).square()).sum().backward()
        optimizer.step()

    p = Elsewhere(torch.ones(5))
    optimizer = make_covon(
        [("w", p)], hess_approx=hess_approx, batch_size=4, implementation="foreach"
    )
    step()
    event.done = True
    step()
    before = state()
    event.done = False
    step(math.inf)
    assert all(map(torch.equal, state(), before))
    step()
    assert not any(map(torch.equal, state(), before))
    after = state()
    event.done = when == "later step"
    says = (
        "gradient of 'w' is not finite or too large in step 3 of this task; that step was skipped"
    )
    with pytest.raises(FloatingPointError, match=says):
        {"later step": step, "consolidate": optimizer.consolidate}.get(when, optimizer.state_dict)()
    assert all(map(torch.equal, state(), after))
    event.done = True
    step()  # training continues
    optimizer.consolidate()
