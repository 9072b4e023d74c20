"""The optimizers that all tests of the protocol run with."""

from functools import partial

import pytest
from toy_optimizers import make_covon, make_vcl

EACH = {
    implementation: partial(
        make_covon, implementation=implementation, hess_approx="gradsq", batch_size=16
    )
    for implementation in ("reference", "foreach", "compiled")
}


@pytest.fixture(params=[make_covon, make_vcl], ids=["CoVON", "BayesByBackprop"])
def make(request):
    return request.param


@pytest.fixture(params=[*EACH.values(), make_vcl], ids=[*EACH, "BayesByBackprop"])
def make_each(request):
    """Each implementation of CoVON, too."""
    return request.param
