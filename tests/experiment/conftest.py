"""A recipe of one short run; runs start their processes quickly."""

import pytest
from small_recipes import short_recipe
from terminal import forks

from covon_avalanche.experiment import worker_pool
from covon_avalanche.experiment.recipe import Recipe


@pytest.fixture
def recipe() -> Recipe:
    """Fine-tuning, one epoch of four batches."""
    return short_recipe("finetune", epochs=1)


@pytest.fixture
def forked(monkeypatch):
    """Worker processes are forked from one that has imported everything."""
    context = forks()
    monkeypatch.setattr(worker_pool.multiprocessing, "get_context", lambda _: context)
