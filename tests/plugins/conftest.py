"""What tests of plugins train."""

import pytest
from toys import toy_model


@pytest.fixture
def model():
    return toy_model()
