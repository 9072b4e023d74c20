"""A recipe of one short run."""

import pytest
from small_recipes import short_recipe

from covon_avalanche.experiment.recipe import Recipe


@pytest.fixture
def recipe() -> Recipe:
    """Fine-tuning, one epoch of four batches."""
    return short_recipe("finetune", epochs=1)
