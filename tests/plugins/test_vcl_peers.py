"""EVCL and TD-VCL against autograd and against VCL; SI against its definition."""

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.training import Naive
from avalanche.training.plugins import SupervisedPlugin, SynapticIntelligencePlugin
from torch import nn
from torch.distributions import Normal, kl_divergence
from toys import QUIET, given_noise, make_vcl, same, toy_benchmark, toy_model, weights

from covon_avalanche import EVCLPlugin, SIPlugin, TDVCLPlugin, VCLPlugin
from covon_avalanche.optim import BayesByBackprop
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.posterior.gaussian import kl, pool


class Watch(SupervisedPlugin):
    """Calls a function at the beginning of each experience, and once in its first step."""

    def __init__(self, at_start=None, at_loss=None):
        super().__init__()
        self.at_start, self.at_loss = at_start, at_loss

    def before_training_epoch(self, strategy, **kwargs):
        if self.at_start is not None and strategy.clock.train_exp_epochs == 0:
            self.at_start(strategy)

    def before_backward(self, strategy, **kwargs):
        if self.at_loss is not None:
            self.at_loss(strategy)


def train(plugin, others=(), n_experiences=3, frozen=()):
    torch.manual_seed(5)
    model = toy_model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    strategy = Naive(
        model=model,
        optimizer=make_vcl(model.named_parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[plugin, *others],
        **QUIET,
    )
    torch.manual_seed(5)
    for experience in toy_benchmark(n_experiences).train_stream:
        strategy.train(experience)
    return strategy


# EVCL ----------------------------------------------------------------------------------


def test_evcl_steps_follow_autograd():
    """KL and elastic penalty by torch.distributions and autograd, two tasks after the first."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    optimizer = BayesByBackprop(
        model.parameters(),
        ess=40.0,
        lr=0.05,
        std_init=0.2,
        weight_decay=0.1,
        inner="sgd",
        importance_strength=3.0,
    )
    mean = model.weight.detach().clone().requires_grad_()
    log_std = torch.full_like(mean, 0.2).log().detach().requires_grad_()
    prior = Normal(torch.zeros_like(mean), torch.full_like(mean, (40.0 * 0.1) ** -0.5))
    total = torch.zeros_like(mean)
    for _ in range(3):
        x, y = torch.randn(30, 5).double(), torch.randint(3, (30,))
        for _ in range(10):
            noise = torch.randn_like(mean)
            with given_noise([noise]), optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            loss = nn.functional.cross_entropy(x @ (mean + log_std.exp() * noise).T, y)
            loss = loss + kl_divergence(Normal(mean, log_std.exp()), prior).sum() / 40
            apart = (mean - prior.loc).square() + (log_std.exp() - prior.scale).square()
            loss = loss + 1.5 * (total * apart).sum()
            gradients = torch.autograd.grad(loss, [mean, log_std])
            with torch.no_grad():
                for value, gradient in zip((mean, log_std), gradients, strict=True):
                    value -= 0.05 * gradient
        torch.testing.assert_close(model.weight, mean, rtol=1e-8, atol=1e-10)
        importance = torch.rand(3, 5).double()
        optimizer.consolidate(importance={model.weight: importance})
        total = total + importance
        prior = Normal(mean.detach().clone(), log_std.detach().exp())


def test_the_evcl_plugin_adds_up_exact_fishers_at_each_mean():
    seen = []

    def fisher_by_itself(strategy):
        if strategy.clock.train_exp_counter > 0:
            data = benchmark.train_stream[strategy.clock.train_exp_counter - 1].dataset
            x = torch.stack([row[0] for row in data])
            y = torch.tensor([int(row[1]) for row in data])
            seen.append(squared_example_gradients(strategy.model, [(x, y)]))

    benchmark = toy_benchmark()
    strategy = train(EVCLPlugin(strength=2.0), [Watch(at_start=fisher_by_itself)])
    assert len(seen) == 2
    seen.append(None)
    x = torch.stack([row[0] for row in benchmark.train_stream[2].dataset])
    y = torch.tensor([int(row[1]) for row in benchmark.train_stream[2].dataset])
    seen[2] = squared_example_gradients(strategy.model, [(x, y)])
    for name, p in strategy.model.named_parameters():
        torch.testing.assert_close(
            strategy.optimizer.state[p]["importance"], sum(f[name] for f in seen)
        )


def test_evcl_without_strength_is_vcl():
    runs = [weights(train(plugin).model) for plugin in (EVCLPlugin(strength=0.0), VCLPlugin())]
    assert same(*runs)
    assert not same(runs[0], weights(train(EVCLPlugin(strength=5.0)).model))


# TD-VCL --------------------------------------------------------------------------------


def test_weights_of_the_targets():
    plugin = TDVCLPlugin(n_steps=4, decay=0.5)
    plugin.posteriors.extend(range(9))
    assert plugin.weights() == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15])
    plugin.decay = 1.0
    assert plugin.weights() == pytest.approx([0.25] * 4)


def test_one_step_without_replay_is_vcl():
    one = train(TDVCLPlugin(n_steps=1))
    assert same(weights(one.model), weights(train(VCLPlugin()).model))


def test_the_prior_of_a_task_stands_for_the_weighted_sum_of_divergences():
    """Gradients of KL to the prior in use, and of the sum over the past posteriors."""
    plugin = TDVCLPlugin(n_steps=3, decay=0.7, replay_examples=0)
    history, gradients = [], []

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
        for name in named:
            mean = q.mean[name]
            pair = [torch.autograd.grad(k, mean, retain_graph=True)[0] for k in (total, ours)]
            gradients.append(pair)

    train(plugin, [Watch(at_start=compare)], n_experiences=4)
    assert len(history) == 4
    for expected, got in gradients:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_frozen_layer_leaves_the_history_of_the_others():
    plugin = TDVCLPlugin(n_steps=3, decay=0.5, replay_examples=0)
    optimizer = train(plugin, n_experiences=2, frozen=["0.weight"]).optimizer
    assert plugin.weights() == [4 / 7, 2 / 7, 1 / 7]
    first, _, last = plugin.posteriors
    assert not torch.equal(first.mean["0.bias"], last.mean["0.bias"])
    assert torch.equal(first.mean["0.weight"], last.mean["0.weight"])
    assert "0.weight" not in optimizer.posterior().mean


def test_the_replayed_loss_has_the_weights_of_the_targets():
    """With all stored examples in each step, the loss is known. The stored ones of a task stand
    for all that it had."""
    checked = []
    stream = toy_benchmark(4, 96).train_stream
    datasets = [e.dataset.subset(range(n)) for e, n in zip(stream, (96, 48, 64, 24), strict=True)]
    plugin = TDVCLPlugin(
        n_steps=3, decay=0.5, replay_tasks=2, replay_examples=20, replay_mb_size=20
    )

    def check(strategy):
        if strategy.clock.train_iterations % 6 or not plugin._memory:
            return
        weight = plugin.weights()
        criterion = strategy._criterion
        expected = criterion(strategy.mb_output, strategy.mb_y)
        torch.set_rng_state(state["now"])
        sizes = [len(data) for data in datasets[: strategy.clock.train_exp_counter + 1]][::-1]
        for i, (_, x, y, _) in enumerate(reversed(plugin._memory), start=1):
            rows = torch.randint(20, (20,))
            loss = criterion(strategy.model(x[rows]), y[rows])
            expected = expected + sum(weight[i:]) * sizes[i] / sizes[0] * loss
        torch.testing.assert_close(strategy.loss.squeeze(), expected)
        checked.append(len(plugin._memory))

    state = {}

    class Before(SupervisedPlugin):
        def before_backward(self, strategy, **kwargs):
            state["now"] = torch.get_rng_state()

    model = toy_model()
    strategy = Naive(
        model=model,
        optimizer=make_vcl(model.named_parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[Before(), plugin, Watch(at_loss=check)],
        **QUIET,
    )
    for experience in benchmark_from_datasets(train=datasets).train_stream:
        strategy.train(experience)
    assert set(checked) == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_steps": 0}, "n_steps must be a whole number >= 1, got 0"),
        ({"replay_mb_size": 1.5}, "replay_mb_size must be a whole number >= 1, got 1.5"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"replay_tasks": -1}, "replay_tasks must be a whole number >= 0, got -1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TDVCLPlugin(**options)


def test_a_bad_batch_size_of_the_fisher_pass_is_named_before_training():
    with pytest.raises(ValueError, match="fisher_mb_size must be a whole number >= 1, got 0"):
        EVCLPlugin(fisher_mb_size=0)


# SI ------------------------------------------------------------------------------------


def si_run(plugin, lr=0.1):
    model = toy_model()
    torch.manual_seed(0)
    plugins = [plugin] if plugin is not None else []
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        criterion=nn.CrossEntropyLoss(),
        plugins=plugins,
        **QUIET,
    )
    for experience in toy_benchmark(2).train_stream:
        strategy.train(experience)
    return weights(model)


def test_si_regularises_where_avalanches_own_does_nothing_on_a_cpu():
    alone = si_run(None)
    assert same(alone, si_run(SynapticIntelligencePlugin(si_lambda=1e4)))  # a trap of 0.6
    assert not same(alone, si_run(SIPlugin(si_lambda=1e4)))


def test_the_importance_of_si_is_the_path_integral():
    """One step of SGD on one batch: -g . dtheta / (dtheta² + eps), at most 1e-3."""
    model = nn.Linear(8, 4)
    start = weights(model)
    plugin = SIPlugin(si_lambda=1.0, eps=10.0)
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        criterion=nn.CrossEntropyLoss(),
        plugins=[plugin],
        train_mb_size=48,
        train_epochs=1,
        evaluator=None,
    )
    experience = toy_benchmark(1).train_stream[0]
    x = torch.stack([row[0] for row in experience.dataset])
    y = torch.tensor([int(row[1]) for row in experience.dataset])
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)[0]
    strategy.train(experience)
    moved = model.weight.detach() - start["weight"]
    torch.testing.assert_close(moved, -0.05 * gradient)
    expected = (-gradient * moved / (moved.square() + 10.0)).clamp(max=1e-3)
    assert (expected > 0).any()
    torch.testing.assert_close(plugin.ewc_data[1]["weight"].data, expected.flatten())
