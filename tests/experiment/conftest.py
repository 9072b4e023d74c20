"""A recipe of one short run; runs make their data and start their processes quickly."""

from functools import cache

import pytest
from small_recipes import short_recipe
from terminal import forks

from covon_avalanche import streams
from covon_avalanche.experiment import worker_pool
from covon_avalanche.experiment.recipe import Recipe

_digits = cache(streams.PermutedDigits)


@pytest.fixture(scope="module", autouse=True)
def domains_are_made_once():
    """Avalanche looks at each label of a domain, which takes a quarter of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "PermutedDigits", _digits)
        yield


@pytest.fixture
def recipe() -> Recipe:
    """Fine-tuning, one epoch of four batches."""
    return short_recipe("finetune", epochs=1)


@pytest.fixture
def forked(monkeypatch):
    """Worker processes are forked from one that has imported everything."""
    context = forks()
    monkeypatch.setattr(worker_pool.multiprocessing, "get_context", lambda _: context)
