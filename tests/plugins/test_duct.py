"""DUCT in Avalanche's training loop."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from torch import nn
from toys import Watch, columns, make_naive, sgd_by_part, toy_benchmark, toy_model, weights

from covon_avalanche.merging import DUCT, update_batch_norm
from covon_avalanche.plugins import DUCTPlugin


def train(model, *plugins, n_experiences=3):
    strategy = make_naive(model, sgd_by_part(model, 0.1), *plugins, train_epochs=5)
    strategy.train(toy_benchmark(n_experiences).train_stream)
    return strategy


def test_each_domain_starts_pretrained_and_the_result_is_task_arithmetic():
    model = DUCT(toy_model(), 4, 3, alpha=0.4)
    starts, trained, ends = [], [], []
    watch = Watch(
        before_training_exp=lambda s: starts.append((weights(model), len(s.optimizer.state))),
        after_training_exp=lambda s: ends.append(weights(model)),
    )
    first = Watch(after_training_exp=lambda s: trained.append(weights(model)))
    pretrained = weights(model.backbone)
    strategy = train(model, first, DUCTPlugin(), watch)
    merged = weights(model.backbone)
    for name, p in pretrained.items():
        changes = [own[f"backbone.{name}"] - p for own in trained]
        assert all(change.any() for change in changes)
        torch.testing.assert_close(merged[name], p + 0.4 * sum(changes))
        assert all(torch.equal(start[f"backbone.{name}"], p) for start, _ in starts)
    assert [size for _, size in starts] == [0, 0, 0]  # no momentum of the domain before
    for t, end in enumerate(ends):
        for block in range(3):
            name = f"head.blocks.{block}"
            now = starts[t][0][name]
            assert torch.equal(end[name], now) == (block != t)  # bitwise, beside its own
            assert torch.equal(trained[t][name], end[name]) == (block != t)  # retrained
    assert len(strategy.optimizer.param_groups) == 2
    x, y = columns(toy_benchmark().test_stream[2])
    assert (model.train()(x).argmax(1) == y).double().mean() > 0.9  # by the last classifier


def test_batch_norm_has_the_statistics_of_the_merged_weights():
    torch.manual_seed(0)
    model = DUCT(nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, 4)), 4, 2)
    train(model, DUCTPlugin(), n_experiences=2)
    found = model.backbone[1].running_mean.clone()
    x, y = columns(toy_benchmark(2).train_stream[1])
    update_batch_norm(model, [(x, y)])
    torch.testing.assert_close(found, model.backbone[1].running_mean)


def test_the_classifier_is_retrained_on_shuffled_images_of_the_training_transform(monkeypatch):
    model, epochs = DUCT(toy_model(), 4, 1), []
    retrain = model.retrain_classifier

    def watched(batches, **options):
        epochs.extend([list(batches()) for _ in range(2)])
        retrain(batches, **options)

    monkeypatch.setattr(model, "retrain_classifier", watched)
    experience = toy_benchmark(1).train_stream[0]
    x, y = columns(experience)
    shifted = experience.dataset.replace_current_transform_group((lambda x: x + 100, None))
    plugin = DUCTPlugin(retrain_epochs=2)
    strategy = make_naive(model, sgd_by_part(model), plugin, train_epochs=1)
    strategy.train(benchmark_from_datasets(train=[shifted]).train_stream)
    orders = []
    for epoch in epochs:
        assert [len(batch[1]) for batch in epoch] == [16, 16, 16]
        shown = torch.cat([batch[0] for batch in epoch]) - 100
        orders.append(torch.cdist(shown, x).argmin(1))
        torch.testing.assert_close(shown, x[orders[-1]], atol=1e-4, rtol=0)
        assert torch.equal(torch.cat([batch[1] for batch in epoch]), y[orders[-1]])
    assert sorted(orders[0].tolist()) == list(range(48))
    assert not torch.equal(*orders)
