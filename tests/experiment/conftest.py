"""A recipe of one short run; runs collect garbage quickly, without all that was imported."""

import gc

import pytest
from small_recipes import short_recipe

from covon_avalanche.experiment.recipe import Recipe


@pytest.fixture(scope="session", autouse=True)
def little_garbage():
    """Exempt what exists from the collections of the tests' runs."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def recipe() -> Recipe:
    """Fine-tuning, one epoch of four batches."""
    return short_recipe("finetune", epochs=1)
