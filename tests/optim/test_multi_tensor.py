"""Multi-tensor operations and the CPU kernel against ``fast_step``; steps on an accelerator."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_optimizers import DEVICES, contents, in_a_task, make_covon, same, step_on, unchanged

from covon_avalanche.optim import CoVON


@pytest.mark.parametrize(
    ("implementation", "dtypes", "tolerance"),
    [("foreach", [torch.float64], 1e-13), ("auto", [torch.float32, torch.float64], 2e-5)]
    + [(name, [torch.float32], 2e-5) for name in ("foreach", "compiled")],
)
@pytest.mark.parametrize("prior", ["tensors", "numbers", "mixed"])
@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize("device", DEVICES)
def test_samples_and_steps_are_those_of_fast_step(
    implementation, dtypes, tolerance, prior, hess_approx, device
):
    """Small, odd and large tensors in one call."""
    if device == "cuda" and dtypes != [torch.float64]:
        pytest.skip("a GPU draws other noise in float32 than in the reference's float64")
    for mc_samples in (1, 2):
        options = dict(prior=prior, hess_approx=hess_approx, mc_samples=mc_samples, device=device)
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


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


class NoNumbers(TorchDispatchMode):
    """Refuses to make a tensor a number, which would wait for a GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation is not torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_on_accelerators_a_bad_gradient_reaches_the_merge(bad, hess_approx, natural, monkeypatch):
    """Steps do not wait for the device; good ones are a CPU's, bit by bit."""

    def fresh(kind, implementation):
        parameters = [("v", kind(torch.ones(2))), ("w", kind(torch.ones(5)))]
        options = dict(hess_approx=hess_approx, batch_size=4, implementation=implementation)
        options["generator"] = torch.Generator().manual_seed(0)
        return CoVON(parameters, **options) if natural else make_covon(parameters, **options)

    def step(o, scale=1.0):
        v, w = o.param_groups[0]["params"]
        step_on(o, lambda: (v - 2).square().sum() + scale * (w - 3).square().sum())

    optimizer, on_cpu = fresh(Elsewhere, "auto"), fresh(nn.Parameter, "foreach")
    for o in (optimizer, on_cpu):
        o.zero_grad()
        step(o)
        step(o)
    assert same(contents(optimizer), contents(on_cpu))
    with NoNumbers():
        step(optimizer, bad)
    monkeypatch.delattr(Elsewhere, "device")
    with pytest.raises(ValueError, match=r"the (mean|precision) of 'w' .* finite"):
        optimizer.consolidate()
    with unchanged(on_cpu), pytest.raises(FloatingPointError, match="of 'w' is not finite"):
        step(on_cpu, bad)


def test_compiled_is_for_cpus():
    optimizer = make_covon([Elsewhere(torch.ones(5))], implementation="compiled")
    with pytest.raises(ValueError, match="implementation='compiled' is for CPUs"):
        optimizer.sampled_params().__enter__()
