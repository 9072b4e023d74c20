"""Multi-tensor operations: skipping a step on the device, and ``torch.compile``."""

import shutil

import pytest
import torch
from step_args import RATES, make_args

from covon_avalanche.optim import multi_tensor

CONSTANT = ("beta1", "clip_radius")


def columns(args):
    """Means to prior precisions, as ``multi_tensor.step`` takes them."""
    fields = ("mean", "grad", "sample", "momentum", "hess", "prior_mean", "prior_precision")
    lists = [[getattr(a, field) for a in args] for field in fields]
    return [x if isinstance(x[0], torch.Tensor) else x[0] for x in lists]


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
        multi_tensor.step(*table, squared=squared, finite=torch.tensor(False), **RATES._asdict())
        assert all(map(torch.equal, contents(args), before))
    args = make_args(torch.float32, "tensors", sizes=(5, 70))
    for some, finite in ((args, torch.tensor(True)), (plain, None)):
        multi_tensor.step(*columns(some), squared=squared, finite=finite, **RATES._asdict())
    assert all(map(torch.equal, contents(args), contents(plain)))
    assert not any(map(torch.equal, contents(args), before))


def test_draws_from_a_posterior_that_does_not_exist_are_not_finite():
    means = [torch.zeros(3)]
    std = multi_tensor.draw_samples(means, [torch.ones(3)], [torch.tensor([-1.0, 0.5, -0.5])], 1, 2)
    assert std[0].isfinite().tolist() == [False, True, False]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_by_torch_it_does_the_same_and_is_compiled_once():
    """Rates change with each step, and must not be compiled in."""
    args, plain = (make_args(torch.float32, "tensors", sizes=(3,)) for _ in range(2))
    run = multi_tensor.compiled_step()
    for i, stance in enumerate(("default", "fail_on_recompile", "fail_on_recompile")):
        rates = RATES._replace(
            ess=50.0 + i, lr=0.1 / (i + 1), rest2=0.02 + i / 100, correction=1 + i, batch_size=4 + i
        )._asdict()
        multi_tensor.step(*columns(plain), squared=False, **rates)
        constant = {key: rates.pop(key) for key in CONSTANT}
        rates = {key: torch.tensor(float(value)) for key, value in rates.items()}
        finite = torch.tensor(i < 2)
        before = contents(args)
        with torch.compiler.set_stance(stance):
            run(*columns(args), squared=False, finite=finite, **constant, **rates)
        want = contents(plain) if i < 2 else before
        for got, expected in zip(contents(args), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
