"""Multi-tensor operations and the CPU kernel against ``fast_step``; the check of gradients that
does not wait for the device."""

import math
import shutil

import pytest
import torch
from step_args import RATES, draw, largest_error, make_args, step
from torch import nn
from toy_optimizers import contents, make_covon, same, step_on

from covon_avalanche.optim import multi_tensor, samples

FAST = pytest.mark.parametrize("implementation", ["foreach", "compiled"])


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("foreach", torch.float64, 1e-13),
        ("foreach", torch.float32, 2e-5),
        ("compiled", torch.float32, 2e-5),
    ],
)
@pytest.mark.parametrize("prior", ["tensors", "numbers", "centre", "mixed"])
def test_a_step_is_fast_step(implementation, dtype, tolerance, prior):
    """Small, odd and large tensors in one call; sizes around the kernel's groups and tiles."""
    for squared in (False, True):
        for mc_samples in (1, 2):
            args, kind = make_args(dtype, prior), dict(squared=squared, mc_samples=mc_samples)
            assert largest_error(args, implementation, **kind) < tolerance, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", ["tensors", "mixed"])
def test_both_draw_the_same_samples_from_the_posterior_in_any_order(dtype, prior):
    key = 2**64 - 9
    one, other = make_args(dtype, prior), make_args(dtype, prior)[::-1]
    assert draw(one, "compiled", key)
    assert draw(other, "foreach", key)
    for a, b in zip(one, reversed(other), strict=True):
        torch.testing.assert_close(a.sample, b.sample)
        z = samples.fill_normal_(torch.empty_like(a.mean), key, a.number)
        want = a.mean + z * (a.rates.ess * a.hess + a.prior_precision) ** -0.5
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
        before = tensors(args)
        done = step(args, implementation, squared=True, mc_samples=mc_samples, limit=1e6)
        kept = list(map(torch.equal, tensors(args), before))
        assert not any(kept) if done else all(kept)
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


def tensors(args):
    return [t.clone() for a in args for t in (a.mean, a.momentum, a.hess)]


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
        before = tensors(args)
        with torch.compiler.set_stance(stance):
            run(*columns(args), squared=False, finite=finite, **constant, **rates)
        want = tensors(plain) if i < 2 else before
        torch.testing.assert_close(tensors(args), want, rtol=1e-5, atol=1e-6)


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


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize(
    ("when", "bad"), [("later step", math.inf), ("consolidate", math.nan), ("state_dict", 1e30)]
)
def test_an_accelerator_skips_a_bad_step_and_a_later_call_raises(event, when, bad, hess_approx):
    """Steps do not wait for the device; good ones are a CPU's, bit by bit."""

    def fresh(kind):
        parameters = [("v", kind(torch.zeros(2))), ("w", kind(torch.ones(5)))]
        options = dict(hess_approx=hess_approx, batch_size=4, implementation="foreach")
        return make_covon(parameters, **options)

    def step(o, scale=1.0):
        v, w = o.param_groups[0]["params"]
        step_on(o, lambda: (v - 1).square().sum() + scale * (w - 3).square().sum())

    def state():
        return {k: v for k, v in contents(optimizer).items() if not k.startswith("step")}

    optimizer, on_cpu = fresh(Elsewhere), fresh(nn.Parameter)
    for o in (optimizer, on_cpu):
        step(o)
        event.done = True
        step(o)
    assert same(contents(optimizer), contents(on_cpu))
    event.done, before = False, state()
    step(optimizer, bad)
    assert same(state(), before)
    step(optimizer)
    assert not any(torch.equal(value, before[key]) for key, value in state().items())
    step(optimizer, bad)
    assert event.waited == 0
    event.done, before = when == "later step", state()
    says = r"gradient of 'w' is not finite or too large in step 3 .*; that step was skipped"
    with pytest.raises(FloatingPointError, match=says):
        {
            "later step": lambda: step(optimizer),
            "consolidate": optimizer.consolidate,
            "state_dict": optimizer.state_dict,
        }[when]()
    assert same(state(), before)
    event.done = True
    step(optimizer)  # training continues
    optimizer.consolidate()
