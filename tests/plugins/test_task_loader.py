"""Passes over data outside training."""

import torch
from toys import make_strategy, toy_benchmark, toy_model

from covon_avalanche.plugins.task_loader import dataset_loader


def test_in_order_all_examples_are_there():
    data = toy_benchmark(n=40).train_stream[0].dataset.eval()
    strategy = make_strategy("covon", toy_model())
    batches = [x for x, _ in dataset_loader(data, strategy, 16)]
    assert [len(x) for x in batches] == [16, 16, 8]
    assert torch.equal(torch.cat(batches), torch.stack([row[0] for row in data]))


def test_shuffled_batches_are_whole_and_the_same_each_time():
    data = toy_benchmark(n=40).train_stream[0].dataset.eval()
    strategy = make_strategy("covon", toy_model())
    runs = [[x for x, _ in dataset_loader(data, strategy, 16, shuffled=True)] for _ in range(2)]
    assert [len(x) for x in runs[0]] == [16, 16]
    assert all(map(torch.equal, *runs))
    (alone,) = dataset_loader(data, strategy, 64, shuffled=True)
    assert len(alone[1]) == 40
