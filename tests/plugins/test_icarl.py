"""iCaRL against Avalanche's where classes do not recur, and by definition where they do."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from avalanche.benchmarks import benchmark_from_datasets, nc_benchmark
from avalanche.training.supervised import ICaRL
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import QUIET, Watch, columns, make_naive, tensor_dataset, toy_benchmark, toy_model

from covon_avalanche import ICaRLPlugin
from covon_avalanche.plugins.icarl import herd, penultimate_features


def icarl(mem_size=24, lr=0.01, plugins=(), **options):
    model, plugin = toy_model(), ICaRLPlugin(mem_size)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return make_naive(model, optimizer, plugin, *plugins, **options), plugin


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 2**16))
def test_herding_is_greedy_and_its_beginning_is_a_choice_too(n, count, seed):
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=float)
    chosen = herd(features, count).tolist()
    assert len(chosen) == len(set(chosen)) == min(n, count)
    goal = features.numpy().mean(0)
    for k in range(1, len(chosen) + 1):
        before = chosen[: k - 1]
        errors = {
            i: np.linalg.norm(features[[*before, i]].numpy().mean(0) - goal)
            for i in set(range(n)) - set(before)
        }
        assert errors[chosen[k - 1]] <= min(errors.values()) + 1e-12
    assert herd(features, max(1, count - 1)).tolist() == chosen[: max(1, min(n, count - 1))]


def test_the_first_exemplars_and_means_are_those_of_avalanches_icarl():
    experience, model = toy_benchmark(1, 400).train_stream[0], toy_model()
    whole = tensor_dataset(*columns(experience))
    theirs = ICaRL(
        feature_extractor=model[:2],
        classifier=model[2],
        optimizer=torch.optim.SGD(model.parameters(), 1e-12),
        memory_size=8,  # so few that theirs, which may choose one twice, does not
        buffer_transform=None,
        fixed_memory=True,
        **{**QUIET, "train_epochs": 1},
    )
    theirs.train(nc_benchmark(whole, whole, 1, task_labels=False, shuffle=False).train_stream)
    memory = next(p for p in theirs.plugins if hasattr(p, "x_memory"))
    ours, plugin = icarl(8, lr=1e-12, train_epochs=1)
    ours.train(experience)
    exemplars = [(tuple(x.tolist()), int(y)) for x, y, *_ in plugin.exemplars[0]]
    for i, labels in enumerate(memory.y_memory):
        mine = [x for x, label in exemplars if label == labels[0]]
        assert len(mine) == 2
        assert set(mine) == {tuple(x) for x in memory.x_memory[i].tolist()}
    for label in range(4):
        assert torch.allclose(plugin.class_means[label][0], memory.class_means[label], atol=1e-6)


def test_the_memory_is_shared_by_the_classes_of_all_tasks_and_keeps_first_choices():
    strategy, plugin = icarl(mem_size=50)
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
    strategy, plugin = icarl(mem_size=1)
    strategy.train(toy_benchmark(2).train_stream)
    assert [len(exemplars) for exemplars in plugin.exemplars] == [4, 4]


def test_the_loss_learns_labels_and_the_outputs_before_the_task():
    batches, sizes, starts = [], [], []
    watch = Watch(
        after_train_dataset_adaptation=lambda s: sizes.append(len(s.adapted_dataset)),
        before_training_exp=lambda s: starts.append((copy.deepcopy(s.model), len(batches))),
        before_backward=lambda s: batches.append((s.mb_x, s.mb_y, s.loss.item())),
    )
    strategy, plugin = icarl(mem_size=16, lr=0.1, train_epochs=1, plugins=[watch])
    one, two = toy_benchmark(2).train_stream

    def cross_entropy(p, target):
        return -(target * np.log(p) + (1 - target) * np.log(1 - p)).mean()

    def first_batch(task):
        """Labels and probabilities, before anything has been learned from the task; the loss."""
        model, at = starts[task]
        x, y, loss = batches[at]
        return np.eye(4)[y], model(x).detach().double().sigmoid().numpy(), loss

    strategy.train(one)
    old = {tuple(row[0].tolist()) for row in plugin.exemplars[0]}
    strategy.train(two)
    labels, p, loss = first_batch(0)
    assert loss == pytest.approx(cross_entropy(p, labels), rel=1e-5)
    labels, p, loss = first_batch(1)
    assert loss == pytest.approx(cross_entropy(p, labels) + cross_entropy(p, p), rel=1e-5)
    assert sizes == [48, 48 + 16]
    assert old <= {tuple(row.tolist()) for x, *_ in batches[starts[1][1] :] for row in x}


def watch_outputs():
    outputs = []
    return outputs, Watch(after_eval_forward=lambda s: outputs.append(s.mb_output.clone()))


def test_means_are_over_images_and_their_mirror_images():
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 3, 4), torch.arange(6) % 2
    data = tensor_dataset(x, y, task_labels=0)
    model, plugin = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 2)), ICaRLPlugin(6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-12)
    make_naive(model, optimizer, plugin).train(benchmark_from_datasets(train=[data]).train_stream)
    both = torch.cat([x, x.flip(3)])
    points = F.normalize(model[:2](both).detach())
    for label in range(2):
        mean = F.normalize(points[torch.cat([y, y]) == label].mean(0), dim=0)
        torch.testing.assert_close(plugin.class_means[label], mean[None])


def test_predictions_are_by_the_nearest_mean_of_all_tasks_exemplars():
    benchmark, (outputs, watch) = toy_benchmark(2), watch_outputs()
    strategy, plugin = icarl(plugins=[watch])
    data, _ = columns(benchmark.test_stream[0])
    strategy.eval(benchmark.test_stream[0])
    assert torch.equal(outputs[0], strategy.model(data))  # no means yet
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream[0])

    def features(x):
        raw = strategy.model[:2](x).detach().double().numpy()
        return raw / np.linalg.norm(raw, axis=1, keepdims=True)

    expected = []
    for exemplars in plugin.exemplars:  # a mean for each task and class
        points = features(torch.stack([row[0] for row in exemplars]))
        labels = np.array([row[1] for row in exemplars])
        means = np.stack([points[labels == c].mean(0) for c in range(4)])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        expected.append(-((features(data)[:, None] - means) ** 2).sum(-1))
    expected = np.max(expected, 0)
    np.testing.assert_allclose(outputs[1].numpy(), expected, atol=1e-5)


def test_classes_not_seen_are_as_far_as_can_be():
    benchmark, (outputs, watch) = toy_benchmark(2, classes_per_experience=2), watch_outputs()
    strategy, plugin = icarl(plugins=[watch])
    strategy.train(benchmark.train_stream[0])
    strategy.eval(benchmark.test_stream[0])
    assert set(plugin.class_means) == {0, 1}
    assert (outputs[0][:, 2:] == -4).all()
    assert (outputs[0][:, :2] > -4).all()


def test_features_of_a_convolutional_head_are_averaged_over_positions():
    body, head = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)
    model = nn.Sequential(body, head)
    model.forward = lambda x: head(input=body(x)).mean((2, 3))
    x = torch.randn(4, 3, 8, 8)
    with penultimate_features(model) as features:
        model(x)
    assert torch.allclose(features[0], body(x).mean((2, 3)), atol=1e-6)
    model(x)
    assert len(features) == 1  # only inside
