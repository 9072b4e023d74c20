"""The same batches as Avalanche's loader, or that loader."""

import pytest
import torch
from avalanche.benchmarks.utils import _make_taskaware_classification_dataset
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import JointTraining, Naive
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchvision.transforms import Compose
from torchvision.transforms.v2 import Identity, ToDtype
from toy_datasets import FastNaive, Scale, digits, loader, pictures, tensors
from toys import same, toy_benchmark, weights

from covon_avalanche import EWCStarStrategy, TensorBatches
from covon_avalanche.data_loading import ExampleCache, TensorLoader, rows_of
from covon_avalanche.experiment.build import Autocast
from covon_avalanche.experiment.resumable import Resumable
from covon_avalanche.streams import PermutedDigits


class FastJoint(TensorBatches, JointTraining):
    pass


DATASETS = {
    "our stream": digits,
    "tensors": tensors,
    "a subset of a subset": lambda: tensors().subset(range(5, 45)).subset(range(30, 0, -2)),
    "a concatenation": lambda: tensors().concat(tensors(30)).subset(range(3, 75, 2)),
    "tensors with a transform": lambda: tensors(transform=Scale()),
    "tensors with one of torchvision's": lambda: tensors(
        transform=Compose([Identity(), ToDtype(torch.float64)])
    ),
    "pictures": pictures,
    "pictures with a transform": lambda: pictures(Scale()),
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    ("train", "options"),
    [(True, {}), (True, {"shuffle": False}), (True, {"drop_last": True}), (False, {})],
)
def test_the_batches_are_avalanches_own(name, train, options):
    """Content, dtype, order over two epochs, number, and what is left of the randomness."""
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


def test_training_is_the_same_bit_by_bit():
    benchmark = PermutedDigits(2)
    results = []
    for kind in (Naive, FastNaive):
        made = trained(kind, benchmark)
        results.append(weights(made.model))
    assert same(*results)


def test_joint_training_is_the_same_bit_by_bit():
    benchmark = PermutedDigits(2)
    assert same(*(weights(trained(k, benchmark).model) for k in (JointTraining, FastJoint)))


def trained(kind, benchmark):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made = kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=100,
        train_epochs=2,
        evaluator=EvaluationPlugin(),
    )
    if isinstance(made, JointTraining):
        made.train(benchmark.train_stream)
    else:
        for experience in benchmark.train_stream:
            made.train(experience)
            made.eval(benchmark.test_stream)
    return made


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: x + torch.randn(()),
        lambda x: x + __import__("random").random(),
        lambda x: x + float(__import__("numpy").random.rand()),
        lambda x, own=torch.Generator(): x + torch.randn((), generator=own),
    ],
    ids=["torch", "random", "numpy", "own generator"],
)
def test_random_transforms_stay_with_avalanche_and_keep_their_randomness(transform):
    data = tensors(transform=transform)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert rows_of(data, ExampleCache(2**20)) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert not isinstance(loader(FastNaive, data), TensorLoader)


def test_a_plugin_that_brings_its_own_loader_is_left_alone():
    benchmark = toy_benchmark()
    loaders = []

    class Keep(ReplayPlugin):
        def before_training_epoch(self, strategy, **kwargs):
            loaders.append(type(strategy.dataloader).__name__)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    model(benchmark.train_stream[0].dataset[0][0][None])
    made = FastNaive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_mb_size=8,
        plugins=[Keep(mem_size=20)],
        evaluator=EvaluationPlugin(),
    )
    for experience in benchmark.train_stream[:2]:
        made.train(experience)
    assert loaders == ["TensorLoader", "ReplayDataLoader"]


class Sentences(Dataset):
    """Token ids, as many as a function of the index tells."""

    deterministic = True

    def __init__(self, length, n=600):
        self.length, self.targets = length, [0] * n

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.full((self.length(index),), index), 0


def padded(examples):
    x, y, t = zip(*examples, strict=True)
    return [pad_sequence(x, batch_first=True), torch.tensor(y), torch.tensor(t)]


@pytest.mark.parametrize(
    "length",
    [lambda i: 1 + i % 7, lambda i: 2 + (i == 1), lambda i: 2 + (i > 300) * (i < 310)],
    ids=["all", "one of the first chunk", "some of the second"],
)
@pytest.mark.parametrize("collate", [padded, None])
def test_examples_of_different_shapes_stay_with_avalanche(length, collate):
    data = Sentences(length)
    data = _make_taskaware_classification_dataset(
        data, task_labels=0, targets=data.targets, collate_fn=collate
    )
    assert not isinstance(loader(FastNaive, data), TensorLoader)


class Sampled(Naive):
    def make_train_dataloader(self, **kwargs):
        sampler = WeightedRandomSampler([1.0] * len(self.adapted_dataset), 5)
        self.dataloader = DataLoader(self.adapted_dataset, self.train_mb_size, sampler=sampler)


class Evaluated(Naive):
    def make_eval_dataloader(self, **kwargs):
        self.dataloader = DataLoader(self.adapted_dataset, 2)


class Halved(Naive):
    """Changes the parameters of Avalanche's loaders only."""

    def _obtain_common_dataloader_parameters(self, **kwargs):
        found = super()._obtain_common_dataloader_parameters(**kwargs)
        return {**found, "batch_size": found["batch_size"] // 2}


def fast(kind):
    return type(f"Fast{kind.__name__}", (TensorBatches, kind), {})


@pytest.mark.parametrize(
    ("kind", "ours_in_training", "ours_in_evaluation"),
    [
        (fast(Sampled), False, True),
        (fast(Evaluated), True, False),
        (fast(Halved), False, False),
        (type("Wrapped", (Resumable, Autocast, TensorBatches, Naive), {}), True, True),
        (EWCStarStrategy, True, True),
    ],
    ids=lambda kind: getattr(kind, "__name__", None),
)
def test_a_strategy_that_makes_its_own_loaders_keeps_them(
    kind, ours_in_training, ours_in_evaluation
):
    data = tensors()
    assert isinstance(loader(kind, data), TensorLoader) == ours_in_training
    assert isinstance(loader(kind, data, train=False), TensorLoader) == ours_in_evaluation


def test_parameters_of_loaders_may_be_changed_above_the_mixin():
    class Doubled(FastNaive):
        def _obtain_common_dataloader_parameters(self, **kwargs):
            found = super()._obtain_common_dataloader_parameters(**kwargs)
            return {**found, "batch_size": found["batch_size"] * 2}

    batches = loader(Doubled, tensors(40), train=False)
    assert [len(x) for x, *_ in batches] == [16, 16, 8]
