"""iCaRL against Avalanche's where classes do not recur, and by definition where they do."""

import numpy as np
import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset
from avalanche.training.supervised import ICaRL
from hypothesis import given
from hypothesis import strategies as st
from toys import QUIET, columns, make_naive, toy_benchmark, toy_model, toy_parts

from covon_avalanche import ICaRLPlugin
from covon_avalanche.plugins.icarl import herd


def icarl(model, mem_size=24, lr=0.01, plugins=(), **options):
    plugin = ICaRLPlugin(mem_size)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return make_naive(model, optimizer, plugin, *plugins, **options), plugin


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 2**16))
def test_herding_is_greedy_and_its_beginning_is_a_choice_too(n, count, seed):
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=float)
    chosen = herd(features, count).tolist()
    assert len(chosen) == len(set(chosen)) == min(n, count)
    goal = features.numpy().mean(0)
    for k in range(1, len(chosen) + 1):
        options = [*chosen[: k - 1]]
        errors = {
            i: np.linalg.norm(features[[*options, i]].numpy().mean(0) - goal)
            for i in set(range(n)) - set(options)
        }
        assert errors[chosen[k - 1]] <= min(errors.values()) + 1e-12
    assert herd(features, max(1, count - 1)).tolist() == chosen[: max(1, min(n, count - 1))]


def test_the_first_exemplars_and_means_are_those_of_avalanches_icarl():
    experience = toy_benchmark(1, 400).train_stream[0]
    whole = _make_taskaware_tensor_classification_dataset(*columns(experience))
    split = nc_benchmark(whole, whole, 1, task_labels=False, shuffle=False)
    model = toy_model()
    theirs = ICaRL(
        feature_extractor=model[:2],
        classifier=model[2],
        optimizer=torch.optim.SGD(model.parameters(), 1e-12),
        memory_size=8,  # so few that theirs, which may choose one twice, does not
        buffer_transform=None,
        fixed_memory=True,
        **{**QUIET, "train_epochs": 1},
    )
    theirs.train(split.train_stream)
    memory = next(p for p in theirs.plugins if hasattr(p, "x_memory"))
    ours, plugin = icarl(toy_model(), 8, lr=1e-12, train_epochs=1)
    ours.train(experience)
    exemplars = torch.stack([row[0] for row in plugin.exemplars[0]])
    labels = torch.tensor([row[1] for row in plugin.exemplars[0]])
    for label in range(4):
        at = [labels[0] for labels in memory.y_memory].index(label)
        mine, other = exemplars[labels == label], memory.x_memory[at]
        assert len(mine) == len(other) == 2
        assert {tuple(r) for r in mine.tolist()} == {tuple(r) for r in other.tolist()}
        assert torch.allclose(plugin.class_means[label], memory.class_means[label], atol=1e-6)


def test_the_memory_is_shared_by_the_classes_of_all_tasks_and_keeps_first_choices():
    strategy, plugin = icarl(toy_model(), mem_size=50)
    first = None
    for t, experience in enumerate(toy_benchmark(3).train_stream, start=1):
        strategy.train(experience)
        share = 50 // (4 * t)
        for exemplars in plugin.exemplars:
            counts = np.bincount([row[1] for row in exemplars], minlength=4)
            assert counts.tolist() == [min(share, 12)] * 4
        kept = [tuple(row[0].tolist()) for row in plugin.exemplars[0]]
        assert first is None or first[: len(kept)] == kept
        first = kept
    assert sum(map(len, plugin.exemplars)) <= 50


def test_the_memory_has_each_class_of_each_task_once_at_least():
    strategy, plugin = icarl(toy_model(), mem_size=1)
    strategy.train(toy_benchmark(2).train_stream)
    assert [len(exemplars) for exemplars in plugin.exemplars] == [4, 4]


class Seen(ICaRLPlugin):
    """Nothing but a look at what is trained on."""

    def __init__(self):
        super().__init__(1)
        self.losses, self.rows = [], []

    def before_backward(self, strategy, **kwargs):
        self.losses.append((strategy.mb_x.clone(), strategy.mb_y.clone(), strategy.loss.item()))

    def after_train_dataset_adaptation(self, strategy, **kwargs):
        self.rows.append(len(strategy.adapted_dataset))

    def after_training_exp(self, strategy, **kwargs):
        """Choose nothing."""

    def after_eval_forward(self, strategy, **kwargs):
        """Predict with the network."""


def test_the_loss_learns_labels_and_the_outputs_before_the_task():
    seen = Seen()
    strategy, plugin = icarl(toy_model(), mem_size=16, lr=0.1, train_epochs=1, plugins=[seen])
    one, two = toy_benchmark(2).train_stream

    def cross_entropy(p, target):
        return -(target * np.log(p) + (1 - target) * np.log(1 - p)).mean()

    def sigmoids(model, x):
        with torch.no_grad():
            return 1 / (1 + np.exp(-model(x).double().numpy()))

    start = toy_model()
    strategy.train(one)
    x, y, loss = seen.losses[0]
    labels = np.eye(4)[y]
    assert loss == pytest.approx(cross_entropy(sigmoids(start, x), labels), rel=1e-5)
    before = toy_model()
    before.load_state_dict(strategy.model.state_dict())
    seen.losses.clear()
    strategy.train(two)
    x, y, loss = seen.losses[0]  # nothing has been learned from the second task yet
    labels, p = np.eye(4)[y], sigmoids(before, x)
    assert loss == pytest.approx(cross_entropy(p, labels) + cross_entropy(p, p), rel=1e-5)
    assert seen.rows == [48, 48 + 16]
    old = [tuple(row[0].tolist()) for row in plugin.exemplars[0]]
    trained = [tuple(row.tolist()) for x, _, _ in seen.losses for row in x]
    assert set(old) <= set(trained)


class Outputs(Seen):
    """Notes predictions."""

    def after_eval_forward(self, strategy, **kwargs):
        self.rows.append(strategy.mb_output.clone())


def test_predictions_are_by_the_nearest_mean_of_all_tasks_exemplars():
    seen, benchmark = Outputs(), toy_benchmark(2)
    strategy, plugin = icarl(toy_model(), plugins=[seen])
    seen.rows.clear()
    strategy.eval(benchmark.test_stream[0])
    data, _ = columns(benchmark.test_stream[0])
    assert torch.equal(seen.rows[0], strategy.model(data))  # no means yet
    strategy.train(benchmark.train_stream)
    seen.rows.clear()
    strategy.eval(benchmark.test_stream[0])

    def features(x):
        raw = strategy.model[:2](x).detach().double().numpy()
        return raw / np.linalg.norm(raw, axis=1, keepdims=True)

    rows = [row for exemplars in plugin.exemplars for row in exemplars]
    points, labels = features(torch.stack([r[0] for r in rows])), np.array([r[1] for r in rows])
    means = np.stack([points[labels == c].mean(0) for c in range(4)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    expected = -((features(data)[:, None] - means) ** 2).sum(-1)
    np.testing.assert_allclose(seen.rows[0].numpy(), expected, atol=1e-5)


def test_classes_not_seen_are_as_far_as_can_be():
    outputs, benchmark = Outputs(), toy_benchmark(2, classes_per_experience=2)
    strategy, plugin = icarl(toy_model(), plugins=[outputs])
    strategy.train(benchmark.train_stream[0])
    strategy.eval(benchmark.test_stream[0])
    assert set(plugin.class_means) == {0, 1}
    assert (outputs.rows[-1][:, 2:] == -4).all()
    assert (outputs.rows[-1][:, :2] > -4).all()


def test_parts_of_an_online_stream_are_one_task():
    strategy, plugin = icarl(toy_model(), train_epochs=1)
    lengths = []
    for experience in toy_parts(2):
        strategy.train(experience)
        lengths.append(len(plugin.exemplars))
    assert lengths == [0, 0, 1, 1, 1, 2]


def test_a_bad_memory_size_is_named():
    with pytest.raises(ValueError, match="mem_size must be an integer >= 1, got 0"):
        ICaRLPlugin(0)


def test_it_keeps_what_fine_tuning_forgets():
    x, y = columns(toy_benchmark(3, 96).test_stream[0])
    accuracies = []
    for plugins in ([ICaRLPlugin(48)], []):
        model = toy_model()
        torch.manual_seed(0)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        strategy = make_naive(model, adamw, *plugins, train_epochs=6)
        strategy.train(toy_benchmark(3, 96).train_stream)
        accuracies.append((model(x).argmax(1) == y).float().mean().item())
    assert accuracies[0] > accuracies[1] + 0.1
