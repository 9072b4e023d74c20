"""``TensorBatches`` gives the same batches as Avalanche's loader, or keeps that loader."""

import pytest
import torch
from avalanche.training.plugins import ReplayPlugin
from avalanche.training.supervised import JointTraining, Naive
from torch.utils.data import DataLoader, WeightedRandomSampler
from toy_datasets import FastNaive, digits, loader, tensors
from toys import make_naive, same, toy_benchmark, toy_model, weights

from covon_avalanche import CoVONStrategy, TensorBatches
from covon_avalanche.data_loading import TensorLoader
from covon_avalanche.experiment.resumable import Resumable
from covon_avalanche.loops import Autocast


class FastJoint(TensorBatches, JointTraining):
    pass


DATASETS = {
    "our stream": digits,
    "tensors": tensors,
    "a subset of a subset": lambda: tensors().subset(range(5, 45)).subset(range(30, 0, -2)),
    "a concatenation": lambda: tensors().concat(tensors(30)).subset(range(3, 75, 2)),
}
OPTIONS = ({}, {"shuffle": False}, {"drop_last": True})


@pytest.mark.parametrize(
    ("name", "train", "options"),
    [(name, True, o) for name in DATASETS for o in OPTIONS]
    + [(name, False, {}) for name in DATASETS],
)
def test_the_batches_are_avalanches_own(name, train, options):
    """Content, dtype, order over two epochs, number, and the random state afterwards."""
    torch.manual_seed(1)
    data = DATASETS[name]()
    seen = []
    for kind in (Naive, FastNaive):
        batches = loader(kind, data, train=train, **options)
        assert isinstance(batches, TensorLoader) == (kind is FastNaive)
        torch.manual_seed(2)
        seen.append([[*batches, *batches], torch.rand(1), len(batches)])
    (slow, chance, length), (fast, same_chance, same_length) = seen
    assert (chance, length, len(slow)) == (same_chance, same_length, len(fast))
    for a, b in zip(slow, fast, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def trained(cls, *plugins):
    benchmark, model = toy_benchmark(), toy_model()
    made = make_naive(model, torch.optim.SGD(model.parameters(), lr=0.1), *plugins, cls=cls)
    if isinstance(made, JointTraining):
        made.train(benchmark.train_stream)
    else:
        for experience in benchmark.train_stream:
            made.train(experience)
            made.eval(benchmark.test_stream)
    return weights(model)


@pytest.mark.parametrize("kinds", [(Naive, FastNaive), (JointTraining, FastJoint)])
def test_training_is_the_same_bit_by_bit(kinds):
    assert same(*map(trained, kinds))


def test_a_plugin_that_brings_its_own_loader_is_left_alone():
    loaders = []

    class Keep(ReplayPlugin):
        def before_training_epoch(self, strategy, **kwargs):
            loaders.append(type(strategy.dataloader).__name__)

    trained(FastNaive, Keep(mem_size=20))
    assert loaders == 2 * ["TensorLoader"] + 4 * ["ReplayDataLoader"]


class Sampled(Naive):
    def make_train_dataloader(self, **kwargs):
        sampler = WeightedRandomSampler([1.0] * len(self.adapted_dataset), 5)
        self.dataloader = DataLoader(self.adapted_dataset, self.train_mb_size, sampler=sampler)


class Evaluated(Naive):
    def make_eval_dataloader(self, **kwargs):
        self.dataloader = DataLoader(self.adapted_dataset, 2)


class Halved:
    """Changes the parameters of Avalanche's loaders only."""

    def _obtain_common_dataloader_parameters(self, **kwargs):
        found = super()._obtain_common_dataloader_parameters(**kwargs)
        return {**found, "batch_size": found["batch_size"] // 2}


def mixed(name, *bases):
    return type(name, (*bases, Naive), {})


@pytest.mark.parametrize(
    ("kind", "ours_in_training", "ours_in_evaluation"),
    [
        (mixed("OwnTrainLoader", TensorBatches, Sampled), False, True),
        (mixed("OwnEvalLoader", TensorBatches, Evaluated), True, False),
        (mixed("OwnParameters", TensorBatches, Halved), False, False),
        (mixed("OwnParametersAbove", Halved, TensorBatches), False, False),
        (mixed("OurMixins", Resumable, Autocast, TensorBatches), True, True),
        (CoVONStrategy, True, True),
    ],
    ids=lambda kind: getattr(kind, "__name__", None),
)
def test_strategies_that_make_own_loaders_keep_them(kind, ours_in_training, ours_in_evaluation):
    data = tensors()
    assert isinstance(loader(kind, data), TensorLoader) == ours_in_training
    assert isinstance(loader(kind, data, train=False), TensorLoader) == ours_in_evaluation


def test_persistent_workers_stay_with_avalanche_and_plugins_may_read_the_data_set():
    data = tensors(20)
    ours = loader(FastNaive, data)
    assert (ours.dataset, ours.batch_size) == (data, 8)
    kept = loader(FastNaive, data, num_workers=1, persistent_workers=True)
    assert not isinstance(kept, TensorLoader)
