"""Passes over data outside training."""

import torch
from toys import make_strategy, toy_benchmark, toy_model

from covon_avalanche.plugins.task_loader import dataset_loader


def batches(mb_size, **options):
    data = toy_benchmark(n=40).train_stream[0].dataset.eval()
    loader = dataset_loader(data, make_strategy("covon", toy_model()), mb_size, **options)
    return data, [x for x, _ in loader]


def test_in_order_all_examples_are_there():
    data, found = batches(16)
    assert [len(x) for x in found] == [16, 16, 8]
    assert torch.equal(torch.cat(found), torch.stack([row[0] for row in data]))


def test_shuffled_batches_are_whole_and_the_same_each_time():
    (_, one), (_, two) = batches(16, shuffled=True), batches(16, shuffled=True)
    assert [len(x) for x in one] == [16, 16]
    assert all(map(torch.equal, one, two))
    _, (alone,) = batches(64, shuffled=True)
    assert len(alone) == 40
