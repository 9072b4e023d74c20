"""Evaluation examples are fetched once, within the memory limit."""

import copy
import pickle

import pytest
import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from toy_datasets import Pictures, pictures, scale, wrapped

from covon_avalanche.data_loading import ExampleCache, rows_of

BYTES = 50 * (3 * 4 * 4 * 4 + 2 * 8)  # of pictures as floats, labels and task labels


def source_of(data):
    while not isinstance(data, Pictures):
        data = data._datasets[0]
    return data


def fetches(data, cache, **options):
    """Whether this process fetches all examples; ``None`` where it is left to Avalanche."""
    source = source_of(data)
    before = source.fetched
    found = rows_of(data, cache, **options)
    return None if found is None else source.fetched - before > 6  # those that are compared


def test_evaluation_over_more_domains_than_memory_holds_keeps_what_fits():
    """If the least recently used made room, nothing would ever be found again."""
    tests = [pictures(scale) for _ in range(4)]
    cache = ExampleCache(limit=2 * BYTES)
    for expected in (True, False, False):
        found = [fetches(data.eval(), cache) for data in tests]  # a new wrapper, as in Avalanche
        assert found == [expected, expected, None, None]
    assert fetches(tests[0], pickle.loads(pickle.dumps(cache))) is True
    assert copy.deepcopy(cache).limit == cache.limit


def test_bytes_stay_bytes():
    rows = rows_of(pictures(), ExampleCache(BYTES // 2))
    assert rows.tensor_batch(torch.tensor([3]))[0].dtype == torch.uint8


def test_workers_fetch_and_leave_the_randomness_as_it_was():
    data, cache = pictures(scale), ExampleCache(BYTES)
    before = torch.get_rng_state()
    assert fetches(data, cache, workers=2) is False
    assert torch.equal(torch.get_rng_state(), before)
    batch = rows_of(data, cache).tensor_batch(torch.arange(50))
    want = data.collate_fn([data[i] for i in range(50)])
    assert all(torch.equal(a, b) for a, b in zip(batch, want, strict=True))


def test_a_data_attribute_that_changes_is_seen():
    """Where it makes a difference only for an example that is not compared."""
    weight = DataAttribute([1.0] * 50, "weight", use_in_getitem=True)
    data = wrapped(AvalancheDataset([Pictures()], data_attributes=[weight])).eval()
    cache = ExampleCache(2**20)
    for lowered in (1, 2):
        weights = [1.0] * 50
        weights[lowered] = 0.0
        changed = data.update_data_attribute("weight", weights)
        *_, column = rows_of(changed, cache).tensor_batch(torch.arange(50))
        assert column.tolist() == weights


def test_a_transform_that_is_replaced_is_seen():
    """Where it makes a difference only for an example that is not compared."""
    data = wrapped(Pictures())
    source = source_of(data)
    source.x[:] = 99
    source.x[1] = 0
    cache = ExampleCache(2**20)
    for dark in (0, 1, 2):
        changed = data.eval().replace_current_transform_group(lambda x, d=dark: x.clamp(min=d))
        x, _ = rows_of(changed, cache).tensor_batch(torch.tensor([1]))
        assert (x == dark).all()


def test_data_that_change_behind_the_wrapper_are_not_taken_from_memory():
    data, cache = pictures(), ExampleCache(2**20)
    assert rows_of(data, cache)
    source_of(data).x += 1
    assert rows_of(data, cache) is None


@pytest.mark.parametrize(
    "length",
    [lambda i: 1 + i % 7, lambda i: 2 + (i == 1), lambda i: 2 + (i > 300) * (i < 310)],
    ids=["all", "one of the first chunk", "some of the second"],
)
def test_examples_of_different_shapes_are_not_cached(length):
    class Sentences(Pictures):
        def __getitem__(self, index):
            return torch.full((length(index),), index), 0

    assert rows_of(wrapped(Sentences(600)).eval(), ExampleCache(2**20)) is None
