"""Runs collect garbage before they begin: quickly, without all that was imported."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def little_garbage():
    """Exempt what exists from the collections of the tests' runs."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
