"""Learning without Forgetting against its definition."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import AvalancheDataset
from torch import nn
from torch.utils.data import TensorDataset
from toys import (
    Watch,
    columns,
    make_naive,
    same,
    sgd,
    tensor_dataset,
    toy_benchmark,
    toy_model,
    weights,
)

from covon_avalanche.plugins import LwFPlugin


def dropout_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.Dropout(0.5), nn.Linear(10, 4))


def test_a_step_descends_on_cross_entropy_and_divergence_from_the_model_of_the_last_task():
    first, second = toy_benchmark(2).train_stream
    model = toy_model()
    strategy = make_naive(model, sgd(model), LwFPlugin(0.7, temperature=3.0), train_epochs=1)
    strategy.train(first)
    teacher = toy_model()
    teacher.load_state_dict(model.state_dict())
    plain = toy_model()
    plain.load_state_dict(model.state_dict())
    optimizer = sgd(plain)
    x, y = columns(second)
    for xs, ys in zip(x.split(16), y.split(16), strict=True):
        optimizer.zero_grad()
        q = torch.softmax(teacher(xs).detach() / 3, 1)
        divergence = (q * (q.log() - torch.log_softmax(plain(xs) / 3, 1))).sum(1).mean()
        (nn.functional.cross_entropy(plain(xs), ys) + 0.7 * divergence).backward()
        optimizer.step()
    strategy.train(second, shuffle=False)
    torch.testing.assert_close(weights(model), weights(plain))


def test_the_teacher_is_in_evaluation_mode_and_the_model_in_training_mode():
    model, plugin, modes = dropout_model(), LwFPlugin(), []
    watch = Watch(before_backward=lambda s: modes.append(s.model[1].training))
    strategy = make_naive(model, sgd(model), plugin, watch)
    for experience in toy_benchmark(3).train_stream:
        strategy.train(experience)
        assert not any(module.training for module in plugin.teacher.modules())
        assert same(weights(plugin.teacher), weights(model))
        assert not any(p.requires_grad for p in plugin.teacher.parameters())
    assert all(modes)


def test_only_outputs_of_earlier_classes_are_distilled():
    """A classifier for four classes, of which the first task has two."""
    model = toy_model()
    strategy = make_naive(model, sgd(model), LwFPlugin())
    seen = []
    stream = toy_benchmark(2, classes_per_experience=2).train_stream
    strategy.train(stream[0])
    assert strategy.plugins[0].classes == [0, 1]
    strategy.plugins[0]._divergence = lambda out, teacher: seen.append(out) or out.sum() * 0
    strategy.train(stream[1])
    assert seen
    assert strategy.plugins[0].classes == [0, 1, 2, 3]
    plugin = LwFPlugin(temperature=1.0)
    plugin.classes = [0, 1]
    outputs = torch.tensor([[0.3, -0.2, 5.0, 1.0]])
    assert plugin._divergence(outputs, torch.tensor([[0.3, -0.2, -7.0, 0.0]])) == 0


def test_classes_are_those_of_the_labels_in_a_benchmark_of_plain_data_sets():
    columns_of = [columns(experience) for experience in toy_benchmark(2).train_stream]
    found = []
    for make in (TensorDataset, tensor_dataset):
        options = {} if make is TensorDataset else {"task_labels": 0}
        data = [AvalancheDataset([make(*pair, **options)]) for pair in columns_of]
        model = toy_model()
        strategy = make_naive(model, sgd(model), LwFPlugin())
        torch.manual_seed(0)
        strategy.train(benchmark_from_datasets(train=data).train_stream)
        found.append((strategy.plugins[0].classes, weights(model)))
    assert found[0][0] == found[1][0] == [0, 1, 2, 3]
    assert same(found[0][1], found[1][1])
