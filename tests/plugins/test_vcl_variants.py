"""TD-VCL and EVCL against VCL, the weighted sum of divergences and exact importances."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import AvalancheDataset
from torch.utils.data import TensorDataset
from toy_optimizers import make_vcl, same, weights
from toys import Watch, columns, make_naive, toy_benchmark, toy_model, train_vcl

from covon_avalanche import EVCLPlugin, TDVCLPlugin, VCLPlugin
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.posterior.gaussian import kl, pool


def test_one_step_without_replay_is_vcl():
    one = train_vcl(TDVCLPlugin(n_steps=1))
    assert same(weights(one.model), weights(train_vcl(VCLPlugin()).model))


def test_the_prior_of_a_task_stands_for_the_weighted_sum_of_divergences():
    """Gradients of KL to the prior in use, and of the sum over the past posteriors."""
    plugin = TDVCLPlugin(n_steps=3, decay=0.7, replay_examples=0)
    history = []

    def compare(strategy):
        optimizer, named = strategy.optimizer, dict(strategy.model.named_parameters())
        current = optimizer.posterior if history else optimizer.prior
        history.insert(0, current(named.items()))
        used = history[:3]
        powers = [0.7**k for k in range(len(used))]
        q = pool(history[:1], [1.3])  # some Gaussian
        q = type(q)({n: (m + 0.1).requires_grad_() for n, m in q.mean.items()}, dict(q.precision))
        total = sum(w / sum(powers) * kl(q, p) for w, p in zip(powers, used, strict=True))
        ours = kl(q, optimizer.prior(named.items()))
        means = list(q.mean.values())
        expected, found = (torch.autograd.grad(k, means, retain_graph=True) for k in (total, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    train_vcl(plugin, [Watch(before_training_exp=compare)], n_experiences=4)
    assert len(history) == 4


def test_a_frozen_layer_leaves_the_history_of_the_others():
    plugin = TDVCLPlugin(n_steps=3, decay=0.5, replay_examples=0)
    optimizer = train_vcl(plugin, n_experiences=2, frozen=["0.weight"]).optimizer
    assert plugin.weights() == [4 / 7, 2 / 7, 1 / 7]
    first, _, last = plugin.posteriors
    assert not torch.equal(first.mean["0.bias"], last.mean["0.bias"])
    assert torch.equal(first.mean["0.weight"], last.mean["0.weight"])
    assert "0.weight" not in optimizer.posterior().mean


def test_the_replayed_loss_has_the_weights_of_the_targets(model):
    """With all stored examples in each step the loss is known; they stand for the whole task."""
    sizes, checked, states = (96, 48, 64, 24), [], []
    stream = toy_benchmark(4, 96).train_stream
    datasets = [e.dataset.subset(range(n)) for e, n in zip(stream, sizes, strict=True)]
    replay = dict(replay_tasks=2, replay_examples=20, replay_mb_size=20)
    plugin = TDVCLPlugin(n_steps=3, decay=0.5, **replay)

    def check(strategy):
        task = strategy.clock.train_exp_counter
        weight, criterion = plugin.weights(), strategy._criterion
        expected = criterion(strategy.mb_output, strategy.mb_y)
        torch.set_rng_state(states[-1])
        for i, (_, x, y, _) in enumerate(reversed(plugin._memory), start=1):
            rows = torch.randint(20, (20,))
            loss = criterion(strategy.model(x[rows]), y[rows])
            expected = expected + sum(weight[i:]) * sizes[task - i] / sizes[task] * loss
        torch.testing.assert_close(strategy.loss.squeeze(), expected)
        checked.append(len(plugin._memory))

    before = Watch(before_backward=lambda strategy: states.append(torch.get_rng_state()))
    after, optimizer = Watch(before_backward=check), make_vcl(model.named_parameters())
    strategy = make_naive(model, optimizer, before, plugin, after)
    strategy.train(benchmark_from_datasets(train=datasets).train_stream)
    assert set(checked) == {0, 1, 2}


def test_stored_targets_are_those_of_the_data():
    """Numbers, of a regression."""
    x, y, model, plugin = torch.randn(32, 8), torch.randn(32, 4), toy_model(), TDVCLPlugin()
    data = AvalancheDataset([TensorDataset(x, y, torch.zeros(32, dtype=torch.int64))])
    strategy = make_naive(model, make_vcl(model.named_parameters()), plugin)
    strategy._criterion = torch.nn.MSELoss()
    strategy.train(benchmark_from_datasets(train=[data, data]).train_stream)
    for _, stored_x, stored_y, _ in plugin._memory:
        order = [int((x == row).all(1).nonzero()) for row in stored_x]
        assert torch.equal(stored_y, y[order])


def test_the_evcl_plugin_adds_up_exact_fishers_at_each_mean():
    stream, found = list(toy_benchmark().train_stream), []

    def fisher_by_itself(strategy):
        batch = columns(stream[strategy.clock.train_exp_counter])
        found.append(squared_example_gradients(strategy.model, [batch]))

    strategy = train_vcl(EVCLPlugin(strength=2.0), [Watch(after_training_exp=fisher_by_itself)])
    assert len(found) == 3
    assert strategy.optimizer.param_groups[0]["importance_strength"] == 2.0
    for name, p in strategy.model.named_parameters():
        importance = strategy.optimizer.state[p]["importance"]
        torch.testing.assert_close(importance, sum(f[name] for f in found))
