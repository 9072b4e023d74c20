"""Multi-tensor operations and the CPU kernel against ``fast_step``; the check of gradients that
does not wait for the device."""

import copy
import math
import shutil
from unittest import mock

import pytest
import torch
from torch import nn
from toy_optimizers import contents, in_a_task, make_covon, same, step_on

from covon_avalanche.optim import multi_tensor


@pytest.mark.parametrize(
    ("implementation", "dtypes", "tolerance"),
    [
        ("foreach", [torch.float64], 1e-13),
        ("foreach", [torch.float32], 2e-5),
        ("compiled", [torch.float32], 2e-5),
        ("auto", [torch.float32, torch.float64], 2e-5),
    ],
)
@pytest.mark.parametrize("prior", ["tensors", "numbers", "centre", "mixed"])
@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
def test_samples_and_steps_are_those_of_fast_step(
    implementation, dtypes, tolerance, prior, hess_approx
):
    """Small, odd and large tensors in one call."""
    for mc_samples in (1, 2):
        options = dict(prior=prior, hess_approx=hess_approx, mc_samples=mc_samples)
        exact = in_a_task("reference", *dtypes, **options)
        for group in exact.param_groups:
            (p,) = group["params"]
            p.data = p.data.double()  # the state follows
        fast = in_a_task(implementation, *dtypes, **options)
        for optimizer in (exact, fast):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            step_on(optimizer, lambda: sum((p - 1).square().sum() for p in parameters))  # noqa: B023
        found, want = contents(fast), contents(exact)
        for i, p in enumerate(parameters):
            for key in (f"mean of {i}", f"momentum of {i}", f"hess of {i}"):
                error = (found[key] - want[key]).abs().max() / want[key].abs().max()
                assert error < tolerance, (key, mc_samples)
                assert found[key].dtype == p.dtype


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_by_torch_it_does_the_same_and_is_compiled_once():
    """Rates change with each step, and must not be compiled in."""
    means, grads, statistics, momenta, prior_means = ([x] for x in torch.randn(5, 3))
    hessians, prior_precisions = ([x] for x in torch.rand(2, 3) + 0.1)
    plain = [means, grads, statistics, momenta, hessians, prior_means, prior_precisions]
    compiled, run = copy.deepcopy(plain), multi_tensor.compiled_update()
    for i, stance in enumerate(("default", "fail_on_recompile", "fail_on_recompile")):
        constant = dict(squared=False, beta1=0.9, clip_radius=0.5)
        rates = dict(ess=50.0 + i, lr=0.1 / (i + 1), one_minus_beta2=0.02 + i / 100)
        rates |= dict(bias_correction=1 / (1 + i), batch_size=4.0 + i)
        before = copy.deepcopy(compiled)
        multi_tensor.update(*plain, **constant, **rates)
        rates = {key: torch.tensor(value) for key, value in rates.items()}
        with torch.compiler.set_stance(stance):
            run(*compiled, allowed=torch.tensor(i < 2), **constant, **rates)
        torch.testing.assert_close(compiled, plain if i < 2 else before, rtol=1e-5, atol=1e-6)


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize(
    ("when", "bad"), [("later step", math.inf), ("consolidate", math.nan), ("state_dict", 1e30)]
)
def test_an_accelerator_skips_a_bad_step_and_a_later_call_raises(
    when, bad, hess_approx, monkeypatch
):
    """Steps do not wait for the device; good ones are a CPU's, bit by bit."""
    event = mock.Mock()
    event.query.return_value = False  # the device has not finished until told so
    monkeypatch.setattr(torch, "Event", lambda device: event)

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
        event.query.return_value = True
        step(o)
    assert same(contents(optimizer), contents(on_cpu))
    event.query.return_value, before = False, state()
    step(optimizer, bad)
    assert same(state(), before)
    step(optimizer)
    assert not any(torch.equal(value, before[key]) for key, value in state().items())
    step(optimizer, bad)
    event.synchronize.assert_not_called()
    event.query.return_value, before = when == "later step", state()
    says = r"gradient of 'w' is not finite or too large in step 3 .*; that step was skipped"
    with pytest.raises(FloatingPointError, match=says):
        {
            "later step": lambda: step(optimizer),
            "consolidate": optimizer.consolidate,
            "state_dict": optimizer.state_dict,
        }[when]()
    assert same(state(), before)
    event.query.return_value = True
    step(optimizer)  # training continues
    optimizer.consolidate()
