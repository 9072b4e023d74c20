"""Passes over data outside training, and the experiences that have no whole task."""

import pytest
import torch
from avalanche.benchmarks.scenarios import split_online_stream
from toys import STRATEGIES, adamw, make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche import ICaRLPlugin, MergePlugin
from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, NearestClassMean
from covon_avalanche.merging import Average
from covon_avalanche.plugins import ClosedFormPlugin
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


def online_experience(boundaries):
    stream = toy_benchmark(1).train_stream
    parts = split_online_stream(stream, experience_size=16, access_task_boundaries=boundaries)
    return next(iter(parts))


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("kind", [*STRATEGIES, "icarl", "merge", "closed form"])
def test_parts_of_a_task_are_refused(kind, boundaries, model):
    if kind in STRATEGIES:
        strategy = make_strategy(kind, model)
    else:
        plugins = {"icarl": ICaRLPlugin(8), "merge": MergePlugin(Average())}
        if kind == "closed form":
            model = ClosedFormModel(FeatureExtractor(model), NearestClassMean(10, 4))
        strategy = make_naive(model, adamw(model), plugins.get(kind, ClosedFormPlugin()))
    with pytest.raises(ValueError, match="online stream are parts of tasks"):
        strategy.train(online_experience(boundaries))


def test_parts_of_a_task_are_trained_with_consolidate_every():
    strategy = make_strategy("covon", toy_model(), consolidate_every=1)
    strategy.train(online_experience(boundaries=False))
    assert strategy.optimizer.state[strategy.model[0].weight]["prior_precision"].min() > 1.0
