"""Batches from tensors: the same as Avalanche's, or Avalanche's own."""

import copy
import pickle
import weakref

import pytest
import torch
from avalanche.benchmarks import PermutedMNIST, SplitMNIST, benchmark_from_datasets
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    _make_taskaware_classification_dataset,
    _make_taskaware_tensor_classification_dataset,
)
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.transform_groups import TransformGroups
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import JointTraining, Naive
from miniature import own
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchvision.datasets import FakeData
from torchvision.transforms import Compose, ToTensor
from torchvision.transforms.v2 import Compose as Compose2
from torchvision.transforms.v2 import Identity, ToDtype
from toys import same, toy_benchmark, weights

from covon_avalanche import EWCStarStrategy, TensorBatches
from covon_avalanche.data_loading import Columns, FetchedExamples, TensorLoader, rows_of
from covon_avalanche.data_loading.fetched import join
from covon_avalanche.data_loading.rows import Beside
from covon_avalanche.experiment.build import Autocast
from covon_avalanche.experiment.resumable import Resumable
from covon_avalanche.streams import DomainFolders, PermutedDigits
from covon_avalanche.streams.permuted import PermutedImages
from covon_avalanche.streams.sources import PixelRows


class FastNaive(TensorBatches, Naive):
    pass


class SmallNaive(FastNaive):
    tensor_batches_bytes = 0


class FastJoint(TensorBatches, JointTraining):
    pass


class Pictures(Dataset):
    """What a folder of images is: rows one by one, with a transform of its own."""

    deterministic = True

    def __init__(self, n=50, transform=None):
        self.x = torch.randint(256, (n, 3, 4, 4), dtype=torch.uint8)
        self.targets = torch.randint(3, (n,)).tolist()
        self.transform = transform
        self.fetched = 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        self.fetched += 1
        x = self.x[index]
        return (x if self.transform is None else self.transform(x)), self.targets[index]


class Scale:
    """A transform of one's own."""

    deterministic = True

    def __call__(self, x):
        return x.float() / 255


def digits():
    return PermutedDigits(2, validation_size=100).train_stream[1].dataset


def tensors(n=50, transform=None):
    x, y = torch.randn(n, 6), torch.randint(3, (n,))
    return _make_taskaware_tensor_classification_dataset(
        x, y, task_labels=0, transform_groups={"train": (transform, None), "eval": (None, None)}
    )


def pictures(transform=None):
    data = Pictures(transform=transform)
    return _make_taskaware_classification_dataset(data, task_labels=0, targets=data.targets)


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


def loader(kind, data, *, train=True, **options):
    model = nn.Linear(1, 1)
    made = kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_mb_size=8,
        evaluator=EvaluationPlugin(),
    )
    made.experience = with_task_labels(benchmark_from_datasets(train=[data])).train_stream[0]
    made.adapted_dataset = data
    made.eval_mb_size = 8
    (made.make_train_dataloader if train else made.make_eval_dataloader)(**options)
    return made.dataloader


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
    assert rows_of(data, FetchedExamples(2**20)) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert not isinstance(loader(FastNaive, data), TensorLoader)


def never_seen_to_change(x, seen=[0]):  # noqa: B006
    """As a rare augmentation with a generator of its own: the probes do not notice it."""
    seen[0] += 1
    return x + 100 if seen[0] % 40 == 0 else x


class Augmented(Pictures):
    """Chance has a part in it, which no attribute called transform tells."""

    deterministic = False

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return never_seen_to_change(x), y


@pytest.mark.parametrize(
    "make",
    [
        lambda: Augmented(),
        lambda: Subset(Augmented(), range(20)),
        lambda: ConcatDataset([Pictures(), Augmented()]),
        lambda: ConcatDataset([Pictures(), Pictures(transform=never_seen_to_change)]),
        lambda: Subset(tensors(transform=never_seen_to_change), range(20)),
    ],
    ids=["itself", "subset", "concatenation", "its transform", "Avalanche's in a subset"],
)
def test_a_dataset_that_may_be_random_is_never_frozen_in_training(make):
    data = AvalancheDataset([make()])
    for _ in range(10):
        assert rows_of(data, FetchedExamples(2**20)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensors(transform=never_seen_to_change),
        lambda: tensors(transform=Compose([Scale(), never_seen_to_change])),
        lambda: tensors(transform=Compose2([Identity(), never_seen_to_change])),
        lambda: tensors(transform=never_seen_to_change).freeze_transforms(),
        lambda: pictures(never_seen_to_change),
        lambda: tensors(transform=never_seen_to_change).subset([3, 1, 2]).concat(tensors()),
    ],
)
def test_a_transform_that_may_be_random_is_never_frozen_in_training(make):
    data = make()
    for _ in range(10):
        assert rows_of(data, FetchedExamples(2**20)) is None
    assert not isinstance(loader(FastNaive, data), TensorLoader)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FakeData(20, (3, 4, 4), transform=ToTensor()),
        lambda: ConcatDataset([Subset(Pictures(), range(20)), Pictures()]),
        lambda: Subset(tensors(transform=Scale()), range(20)),
    ],
    ids=["torchvision", "parts", "Avalanche's in a subset"],
)
def test_known_datasets_are_kept_in_training(make):
    assert rows_of(AvalancheDataset([make()]), FetchedExamples(2**20)) is not None


def test_transforms_for_evaluation_are_trusted():
    transform = {"train": (lambda x: -x, None), "eval": (lambda x: x / 2, None)}
    data = _make_taskaware_tensor_classification_dataset(
        torch.randn(9, 6), torch.zeros(9).long(), task_labels=0, transform_groups=transform
    )
    assert rows_of(data, FetchedExamples(2**20)) is None
    assert rows_of(data.eval(), FetchedExamples(2**20)) is not None


def test_fetched_examples_are_fetched_once_and_bounded():
    data, more = pictures(), pictures(Scale())
    source = data._flat_data._datasets[0]
    kept = FetchedExamples(limit=50 * (48 * 4 + 16))
    first = rows_of(data, kept)
    after_one = source.fetched
    assert first.tensor_batch(torch.tensor([3]))[0].dtype == torch.uint8  # bytes stay bytes
    rows_of(data.train(), kept)  # a new wrapper of the same data, as each experience makes
    assert source.fetched - after_one <= 12  # only the probes
    assert rows_of(more, kept) is not None  # takes the whole room
    assert len(kept._kept) == 1
    assert rows_of(more, FetchedExamples(limit=1000)) is None
    assert pickle.loads(pickle.dumps(kept))._kept == {}
    assert copy.deepcopy(kept).limit == kept.limit


def fetches(data, kept, **options):
    """Whether this process fetches all examples; ``None`` where it is left to Avalanche."""
    source = data._flat_data._datasets[0]
    before = source.fetched
    found = rows_of(data, kept, **options)
    return None if found is None else source.fetched - before > 12  # those that are compared


def room_for(datasets):
    """Of scaled pictures."""
    return FetchedExamples(limit=datasets * 50 * (48 * 4 + 16))


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


def test_batches_are_joined_in_memory_for_one_copy():
    seen = []

    def batches():
        for i in range(4):
            part = torch.full((3, 2), i)
            seen.append(weakref.ref(part))
            yield [part]
            del part
            assert [ref() is not None for ref in seen] == [False] * i + [True]

    (column,) = join(batches(), 12)
    assert column.tolist() == [[i // 3] * 2 for i in range(12)]


def test_a_data_attribute_that_changes_is_seen():
    """Where it makes a difference only for an example that is not compared."""
    weight = DataAttribute([1.0] * 50, "weight", use_in_getitem=True)
    data = AvalancheDataset([Pictures()], data_attributes=[weight])
    data = _wrapped(data, Scale())
    kept = FetchedExamples(2**20)
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
    kept = FetchedExamples(2**20)
    for dark in (0, 1, 2):
        changed = data.eval().replace_current_transform_group(lambda x, d=dark: x.clamp(min=d))
        x, _ = rows_of(changed, kept).tensor_batch(torch.tensor([1]))
        assert (x == dark).all()


@pytest.mark.parametrize("cache", [True, False])
def test_transforms_that_take_batches_are_used_where_memory_is_short(tmp_path, cache):
    options = {"cache": tmp_path / "cache"} if cache else {}
    benchmark = DomainFolders(own(tmp_path / "data", "split"), **options)
    train, test = (benchmark.streams[name][1].dataset for name in ("train", "test"))
    nothing = FetchedExamples(0)
    part = test.concat(train.eval()).subset([13, 0, 7, 2])
    for data in (test, train.eval(), part):
        rows = rows_of(data, nothing)
        indices = torch.tensor([3, 0, 1])
        batch = rows.tensor_batch(indices)
        want = data.collate_fn([data[i] for i in indices.tolist()])
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, want, strict=True)
        )
        assert rows_of(data, nothing, workers=1) is None  # Avalanche's loader is faster
    assert rows_of(train, nothing) is None  # its transform is random
    assert nothing._kept == {}
    assert not isinstance(loader(SmallNaive, test, train=False, num_workers=1), TensorLoader)
    assert isinstance(loader(SmallNaive, test, train=False), TensorLoader)


def test_data_that_changes_behind_the_wrapper_is_not_taken_from_memory():
    data = pictures()
    kept = FetchedExamples(2**20)
    rows_of(data, kept)
    data._flat_data._datasets[0].x += 1
    assert rows_of(data, kept) is None


def test_several_tasks_are_balanced_by_avalanche():
    two = tensors().concat(
        _make_taskaware_tensor_classification_dataset(
            torch.randn(9, 6), torch.randint(3, (9,)), task_labels=1
        )
    )
    assert rows_of(two, FetchedExamples(2**20)) is None


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


class OneLabelFlipped:
    """Between two probes."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 1 - int(y) if index == 1 else int(y)


class FlippedTensors(OneLabelFlipped, TensorDataset):
    pass


class FlippedPermutation(OneLabelFlipped, PermutedImages):
    pass


class FlippedPixels(OneLabelFlipped, PixelRows):
    pass


class OneRow:
    """Images of one pixel."""

    labels = [0] * 50

    def __len__(self):
        return 50

    def pixels(self, index):
        return torch.full((3, 1, 1), index, dtype=torch.uint8)


class Batched(Scale):
    def batch(self, inputs):
        return torch.stack([self(x) for x in inputs])


def flipped_tensors():
    return _wrapped(FlippedTensors(torch.randn(50, 6), torch.zeros(50).long()))


def flipped_permutation():
    pixels, order = torch.zeros(50, 2, 2, dtype=torch.uint8), torch.arange(4)
    return _wrapped(FlippedPermutation(pixels, torch.zeros(50).long(), order, 255))


def flipped_pixels():
    return _wrapped(FlippedPixels(OneRow()), Batched())


def flipped_outside():
    class Flipped(OneLabelFlipped, AvalancheDataset):
        pass

    return Flipped([TensorDataset(torch.randn(50, 6), torch.zeros(50).long())])


def _wrapped(data, transform=None):
    groups = TransformGroups({"train": (transform, None), "eval": (None, None)})
    return AvalancheDataset([data], transform_groups=groups if transform else None)


@pytest.mark.parametrize(
    "make", [flipped_tensors, flipped_permutation, flipped_pixels, flipped_outside]
)
def test_a_subclass_that_overrides_getitem_gives_its_own_rows(make):
    data = make()
    rows = rows_of(data, FetchedExamples(0))
    assert data[1][1] == 1
    assert rows is None


def test_a_subclass_may_override_the_batch_as_well():
    class Flipped(FlippedPermutation):
        def tensor_batch(self, indices):
            x, y = super().tensor_batch(indices)
            return x, torch.where(indices == 1, 1 - y, y)

        def __getitem__(self, index):
            x, y = self.tensor_batch(torch.tensor([index]))
            return x[0], int(y)

    pixels, order = torch.zeros(50, 2, 2, dtype=torch.uint8), torch.arange(4)
    data = _wrapped(Flipped(pixels, torch.zeros(50).long(), order, 255))
    _, y = rows_of(data, FetchedExamples(0)).tensor_batch(torch.arange(3))
    assert y.tolist() == [0, 1, 0]


class OneDevice(TorchFunctionMode):
    """Refuses tensors of two devices in one call, as CUDA does and "meta" does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert len({a.device for a in args if isinstance(a, torch.Tensor)}) < 2
        return func(*args, **(kwargs or {}))


def test_tensors_may_lie_on_another_device():
    far, near = torch.empty(5, 2, device="meta"), torch.arange(5)
    rows = Beside(Columns([far, near]), [far])
    with OneDevice():
        batch = rows.tensor_batch(torch.tensor([3, 1]))
    assert [tuple(column.shape) for column in batch] == [(2, 2), (2,), (2, 2)]
    assert batch[1].tolist() == [3, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_a_gpu_stay_there():
    x, y = torch.randn(50, 6, device="cuda"), torch.randint(3, (50,), device="cuda")
    for data in (
        AvalancheDataset([TensorDataset(x, y)]),
        _make_taskaware_tensor_classification_dataset(x, y, task_labels=0),
    ):
        batch = rows_of(data, FetchedExamples(2**20)).tensor_batch(torch.tensor([7, 2]))
        want = data.collate_fn([data[7], data[2]])
        for a, b in zip(batch, want, strict=True):
            assert a.device == b.device
            assert torch.equal(a, b)


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


def test_a_collate_function_that_changes_nothing_costs_nothing():
    data = Sentences(lambda i: 3, 20)
    data = _make_taskaware_classification_dataset(
        data, task_labels=0, targets=data.targets, collate_fn=padded
    )
    x, *_ = rows_of(data, FetchedExamples(2**20)).tensor_batch(torch.tensor([4, 2]))
    assert x.tolist() == [[4] * 3, [2] * 3]


def test_batches_that_depend_on_their_other_examples_stay_with_avalanche():
    def shortened(examples):
        x, y = default_collate(examples)
        return [x[:, : int((x > 0).sum(1).max())], y]

    x = torch.ones(50, 6)
    x[10:, 4:] = 0
    data = AvalancheDataset([TensorDataset(x, torch.zeros(50).long())], collate_fn=shortened)
    assert rows_of(data, FetchedExamples(2**20)) is None


@pytest.mark.parametrize(
    ("values", "fast"),
    [
        (list(torch.randn(50, 4)), True),
        ([float(i) for i in range(50)], True),
        ([[0.5, i] for i in range(50)], False),
        ([torch.ones(1 + i % 2) for i in range(50)], False),
    ],
    ids=["vectors", "numbers", "lists", "different shapes"],
)
def test_attributes_are_given_as_avalanche_gives_them(values, fast):
    logits = DataAttribute(values, "logits", use_in_getitem=True)
    data = TensorDataset(torch.randn(50, 6), torch.zeros(50).long())
    data = AvalancheDataset([data], data_attributes=[logits])
    rows = rows_of(data, FetchedExamples(0))
    assert (rows is not None) == fast
    if fast:
        want = data.collate_fn([data[4], data[2]])
        batch = rows.tensor_batch(torch.tensor([4, 2]))
        assert all(torch.equal(a, b) for a, b in zip(batch, want, strict=True))


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


def test_avalanches_own_benchmarks(real_data):
    """SplitMNIST with its PIL images and deterministic transforms."""
    benchmark = SplitMNIST(5, dataset_root=real_data("MNIST/raw"), train_transform=None)
    data = benchmark.train_stream[0].dataset
    small = data.subset(range(200))
    kept = FetchedExamples(2**30)
    rows = rows_of(small.eval(), kept)
    x, y, t = rows.tensor_batch(torch.tensor([150, 0]))
    want = [small.eval()[i] for i in (150, 0)]
    assert all(torch.equal(a, b[0]) for a, b in zip(x, want, strict=True))
    assert y.tolist() == [int(w[1]) for w in want]
    assert t.tolist() == [int(w[2]) for w in want]


def test_avalanches_own_benchmarks_are_kept_in_training(real_data):
    root = real_data("MNIST/raw/train-images-idx3-ubyte")
    for benchmark in (SplitMNIST(5, dataset_root=root), PermutedMNIST(2, dataset_root=root)):
        small = benchmark.train_stream[1].dataset.subset(range(20))
        assert rows_of(small, FetchedExamples(2**30)) is not None


def test_our_digits_are_kept_behind_transforms():
    for options in ({"eval_transform": Scale()}, {"train_transform": Scale()}):
        data = PermutedDigits(2, **options).train_stream[1].dataset
        assert rows_of(data, FetchedExamples(2**30)) is not None
