"""The optimizers that tests of the protocol run with."""

from functools import partial

import pytest
from toy_optimizers import make_covon, make_vcl

IMPLEMENTATIONS = ("reference", "foreach", "compiled")
EACH = {
    name: partial(make_covon, implementation=name, hess_approx="gradsq", batch_size=16)
    for name in IMPLEMENTATIONS
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture(params=[make_covon, make_vcl], ids=["CoVON", "BayesByBackprop"])
def make(request):
    return request.param


@pytest.fixture(params=[*EACH.values(), make_vcl], ids=[*EACH, "BayesByBackprop"])
def make_each(request):
    """With each implementation of CoVON."""
    return request.param
