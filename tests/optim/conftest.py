"""The optimizers that tests of the protocol run with."""

from functools import partial

import pytest
from toy_optimizers import make_covon, make_vcl

EACH = {
    name: partial(make_covon, implementation=name, hess_approx="gradsq", batch_size=16)
    for name in ("foreach", "compiled")
}


@pytest.fixture(params=["reference", *EACH])
def implementation(request):
    return request.param


@pytest.fixture(params=[make_covon, make_vcl], ids=["CoVON", "BayesByBackprop"])
def make(request):
    return request.param


@pytest.fixture(params=[*EACH.values(), make_vcl], ids=[*EACH, "BayesByBackprop"])
def make_each(request):
    """With each way to draw and to step: multi-tensor operations, the CPU kernel, and parameter by
    parameter, which CoVON's reference has in common with BayesByBackprop."""
    return request.param
