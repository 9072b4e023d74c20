"""Examples are fetched once, within the memory limit."""

import copy
import pickle
import weakref

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from toy_datasets import Pictures, Scale, pictures, wrapped

from covon_avalanche.data_loading import ExampleCache, rows_of
from covon_avalanche.data_loading.example_cache import concatenate


def test_examples_are_fetched_once_and_bounded():
    data, more = pictures(), pictures(Scale())
    source = data._flat_data._datasets[0]
    kept = ExampleCache(limit=50 * (48 * 4 + 16))
    first = rows_of(data, kept)
    after_one = source.fetched
    assert first.tensor_batch(torch.tensor([3]))[0].dtype == torch.uint8  # bytes stay bytes
    rows_of(data.train(), kept)  # a new wrapper of the same data, as each experience makes
    assert source.fetched - after_one <= 12  # only the probes
    assert rows_of(more, kept) is not None  # takes the whole room
    assert len(kept._entries) == 1
    assert rows_of(more, ExampleCache(limit=1000)) is None
    assert pickle.loads(pickle.dumps(kept))._entries == {}
    assert copy.deepcopy(kept).limit == kept.limit


def fetches(data, kept, **options):
    """Whether this process fetches all examples; ``None`` where it is left to Avalanche."""
    source = data._flat_data._datasets[0]
    before = source.fetched
    found = rows_of(data, kept, **options)
    return None if found is None else source.fetched - before > 12  # those that are compared


def room_for(datasets):
    """Of scaled pictures."""
    return ExampleCache(limit=datasets * 50 * (48 * 4 + 16))


def test_evaluation_over_more_domains_than_memory_holds_keeps_what_fits():
    """If the least recently used made room, nothing would ever be found again."""
    tests = [pictures(Scale()).eval() for _ in range(4)]
    kept = room_for(2)
    first, *later = [[fetches(data, kept) for data in tests] for _ in range(3)]
    assert first == [True, True, None, None]
    assert later == [[False, False, None, None]] * 2


def test_a_training_experience_takes_the_place_of_the_one_before():
    train = [pictures(Scale()) for _ in range(3)]
    tests = [pictures(Scale()).eval() for _ in range(3)]
    kept = room_for(3)
    found = []
    for experience in train:
        found.append(fetches(experience, kept))
        found.append([fetches(data, kept) for data in tests])
    assert found[::2] == [True, True, True]
    assert found[1::2] == [[True, True, None], [False, False, None], [False, False, None]]


def test_training_data_take_the_place_of_test_data_if_need_be():
    kept = room_for(1)
    test, train = pictures(Scale()).eval(), pictures(Scale())
    assert fetches(test, kept)
    assert fetches(train, kept)
    assert fetches(test, kept) is None
    assert fetches(train, kept) is False


def test_workers_fetch_what_is_kept():
    data, kept = pictures(Scale()), room_for(1)
    before = torch.get_rng_state()
    assert fetches(data, kept, workers=2) is False
    assert torch.equal(torch.get_rng_state(), before)
    batch = rows_of(data, kept).tensor_batch(torch.arange(50))
    want = data.collate_fn([data[i] for i in range(50)])
    assert all(torch.equal(a, b) for a, b in zip(batch, want, strict=True))


def test_batches_are_concatenated_in_memory_for_one_copy():
    seen = []

    def batches():
        for i in range(4):
            part = torch.full((3, 2), i)
            seen.append(weakref.ref(part))
            yield [part]
            del part
            assert [ref() is not None for ref in seen] == [False] * i + [True]

    (column,) = concatenate(batches(), 12)
    assert column.tolist() == [[i // 3] * 2 for i in range(12)]


def test_a_data_attribute_that_changes_is_seen():
    """Where it makes a difference only for an example that is not compared."""
    weight = DataAttribute([1.0] * 50, "weight", use_in_getitem=True)
    data = AvalancheDataset([Pictures()], data_attributes=[weight])
    data = wrapped(data, Scale())
    kept = ExampleCache(2**20)
    for lowered in (1, 2):
        weights = [1.0] * 50
        weights[lowered] = 0.0
        changed = data.update_data_attribute("weight", weights)
        *_, column = rows_of(changed, kept).tensor_batch(torch.arange(50))
        assert column.tolist() == weights


def test_a_transform_that_is_replaced_is_seen():
    """Where it makes a difference only for an example that is not compared."""
    data = AvalancheDataset([Pictures()])
    source = data._flat_data._datasets[0]
    source.x[:] = 99
    source.x[1] = 0
    kept = ExampleCache(2**20)
    for dark in (0, 1, 2):
        changed = data.eval().replace_current_transform_group(lambda x, d=dark: x.clamp(min=d))
        x, _ = rows_of(changed, kept).tensor_batch(torch.tensor([1]))
        assert (x == dark).all()
