"""EWC, SI, MAS and RWalk against their definitions written out, and Avalanche's SI."""

import pytest
import torch
from avalanche.training.plugins import SynapticIntelligencePlugin
from torch import nn
from toy_optimizers import same, weights
from toys import ToDouble, Watch, columns, make_naive, sgd, toy_benchmark, toy_model

from covon_avalanche.plugins import AvalancheSIPlugin, EWCPlugin, MASPlugin, RWalkPlugin, SIPlugin
from covon_avalanche.plugins.task_loader import task_loader

LR = 0.1
EXPERIENCES = 3
PLUGINS = {
    "ewc": lambda: EWCPlugin(5.0),
    "si": lambda: SIPlugin(2.0, xi=0.01),
    "mas": lambda: MASPlugin(0.05),
    "rwalk": lambda: RWalkPlugin(0.5, fisher_decay=0.6, delta_t=4),
}
each = pytest.mark.parametrize("name", PLUGINS)


class Definition:
    """A method by hand: ``penalty`` is differentiated by autograd, together with the loss."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.start()

    def start(self):
        self.first = self.values()

    def values(self):
        return [p.detach().clone() for p in self.parameters]

    def zeros(self):
        return [torch.zeros_like(p) for p in self.parameters]

    def penalty(self):
        return 0.0

    def step(self, gradients, before):
        pass

    def end(self, model, x, y):
        pass


def example_gradients(model, loss, x, y):
    """Gradients of each example, by a loop."""
    for i in range(len(y)):
        value = loss(model(x[i : i + 1]), y[i : i + 1])
        yield torch.autograd.grad(value, list(model.parameters()))


class EWCByHand(Definition):
    """Kirkpatrick et al., Eq. 3: one penalty per task."""

    def __init__(self, model):
        super().__init__(model)
        self.tasks = []

    def penalty(self):
        return sum(
            2.5 * (f * (p - old) ** 2).sum()
            for fisher, anchor in self.tasks
            for f, p, old in zip(fisher, self.parameters, anchor, strict=True)
        )

    def end(self, model, x, y):
        total = self.zeros()
        for gradients in example_gradients(model, nn.functional.cross_entropy, x, y):
            total = [t + g**2 for t, g in zip(total, gradients, strict=True)]
        self.tasks.append(([t / len(y) for t in total], self.values()))


class Anchored(Definition):
    """One importance, and the weights after the last task."""

    strength = 1.0

    def __init__(self, model):
        super().__init__(model)
        self.importance, self.anchor = self.zeros(), self.zeros()

    def penalty(self):
        terms = zip(self.importance, self.parameters, self.anchor, strict=True)
        return self.strength * sum((i * (p - old) ** 2).sum() for i, p, old in terms)

    def end(self, model, x, y):
        self.anchor = self.values()


class SIByHand(Anchored):
    """Zenke et al., Eqs. 3 to 5, with the authors' relu."""

    strength = 2.0

    def start(self):
        super().start()
        self.omega = self.zeros()

    def step(self, gradients, before):
        for i, p in enumerate(self.values()):
            self.omega[i] = self.omega[i] - gradients[i] * (p - before[i])

    def end(self, model, x, y):
        for i, p in enumerate(self.values()):
            new = self.omega[i] / ((p - self.first[i]) ** 2 + 0.01)
            self.importance[i] = (self.importance[i] + new).clamp(min=0)
        super().end(model, x, y)


class MASByHand(Anchored):
    """Aljundi et al., Eqs. 2 to 4."""

    strength = 0.05

    def end(self, model, x, y):
        def norm(output, _):
            return (output**2).sum()

        for gradients in example_gradients(model, norm, x, y):
            for i, g in enumerate(gradients):
                self.importance[i] = self.importance[i] + g.abs() / len(y)
        super().end(model, x, y)


class RWalkByHand(Anchored):
    """Chaudhry et al., Eqs. 6 to 8, in windows of four of the six steps of a task."""

    strength = 0.5

    def __init__(self, model):
        super().__init__(model)
        self.fisher = self.scores = None

    def start(self):
        super().start()
        self.window, self.steps, self.new = self.values(), [], self.zeros()

    def step(self, gradients, before):
        moves = [p - old for p, old in zip(self.values(), before, strict=True)]
        self.steps.append((gradients, moves))
        if len(self.steps) == 4:
            self.close()

    def close(self):
        squares = [torch.stack([g[i] ** 2 for g, _ in self.steps]) for i in range(4)]
        path = [torch.stack([-g[i] * m[i] for g, m in self.steps]).sum(0) for i in range(4)]
        recent = [s.mean(0) for s in squares]
        if self.fisher is None:
            self.fisher = recent
        for i, p in enumerate(self.values()):
            distance = self.fisher[i] * (p - self.window[i]) ** 2  # in the metric of the start
            self.new[i] = self.new[i] + (path[i] / (distance + 1e-3)).clamp(min=0)
        self.fisher = [0.6 * r + 0.4 * f for r, f in zip(recent, self.fisher, strict=True)]
        self.window, self.steps = self.values(), []

    def end(self, model, x, y):
        self.close()
        old = self.scores or self.new
        self.scores = [(s + n) / 2 for s, n in zip(old, self.new, strict=True)]
        most = [max(v.max() for v in values) for values in (self.fisher, self.scores)]
        terms = zip(self.fisher, self.scores, strict=True)
        self.importance = [f / most[0] + s / most[1] for f, s in terms]
        super().end(model, x, y)


BY_HAND = {"ewc": EWCByHand, "si": SIByHand, "mas": MASByHand, "rwalk": RWalkByHand}


def by_hand(definition):
    """Gradient descent on loss and penalty, in float64."""
    model = toy_model().double()
    parameters = list(model.parameters())
    own = definition(model)
    for experience in toy_benchmark(EXPERIENCES).train_stream:
        x, y = columns(experience)
        x = x.double()
        own.start()
        for xs, ys in [*zip(x.split(16), y.split(16), strict=True)] * 2:
            loss = nn.functional.cross_entropy(model(xs), ys)
            gradients = torch.autograd.grad(loss, parameters)
            penalty = own.penalty()
            more = torch.autograd.grad(penalty, parameters) if torch.is_tensor(penalty) else 0
            before = own.values()
            with torch.no_grad():
                for i, p in enumerate(parameters):
                    p -= LR * (gradients[i] + (more[i] if more else 0))
            own.step(gradients, before)
        own.end(model, x, y)
    return weights(model)


def trained(plugin):
    model = toy_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    strategy = make_naive(model, optimizer, plugin, ToDouble())
    strategy.train(toy_benchmark(EXPERIENCES).train_stream, shuffle=False)
    return weights(model)


@pytest.fixture
def double_loader(monkeypatch):
    """Passes over a task's data in float64."""
    from covon_avalanche.plugins import ewc, mas

    for module in (ewc, mas):
        monkeypatch.setattr(
            module, "task_loader", lambda *args: ((x.double(), y) for x, y in task_loader(*args))
        )


@each
def test_a_method_is_its_definition(name, double_loader):
    expected = by_hand(BY_HAND[name])
    torch.testing.assert_close(trained(PLUGINS[name]()), expected, rtol=1e-8, atol=1e-10)
    plain = by_hand(Definition)
    assert max((expected[n] - plain[n]).abs().max() for n in plain) > 0.01


@each
def test_every_training_forward_is_in_training_mode(name):
    """So that dropout and batch statistics are trained with, and a task's end changes no mode."""
    seen = []
    model = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 4))
    watch = Watch(before_forward=lambda s: seen.append(s.model[2].training))
    step = Watch(before_training_iteration=lambda s: seen.append(s.model[1].training))
    strategy = make_naive(model, sgd(model), PLUGINS[name](), watch, step)
    calls = []
    model[3].register_forward_hook(lambda layer, x, y: calls.append(layer.training))
    strategy.train(toy_benchmark(EXPERIENCES).train_stream)
    assert all(seen)
    assert len(seen) == 2 * 2 * 3 * EXPERIENCES
    assert sum(calls) == 2 * 3 * EXPERIENCES  # no second forward pass in a step


def test_paths_and_squares_of_bfloat16_weights_are_summed_in_float32():
    """Over 300 steps, in which sums in bfloat16 lose several per cent."""
    model, steps = toy_model().bfloat16(), {}
    start = weights(model)
    path, squares = ({n: p.double() * 0 for n, p in start.items()} for _ in range(2))

    def narrow(strategy):
        strategy.mbatch[0] = strategy.mbatch[0].bfloat16()

    def before(strategy):
        for name, p in strategy.model.named_parameters():
            steps[name] = p.grad.double(), p.detach().double()

    def after(strategy):
        for name, p in weights(strategy.model).items():
            gradient, old = steps[name]
            path[name] -= gradient * (p.double() - old)
            squares[name] += gradient**2 / 300

    watch = Watch(before_forward=narrow, before_update=before, after_update=after)
    si, rwalk = SIPlugin(0.0), RWalkPlugin(0.0, delta_t=10_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options = {"train_epochs": 25, "train_mb_size": 4}
    make_naive(model, optimizer, watch, si, rwalk, **options).train(toy_benchmark(1).train_stream)
    for name, p in weights(model).items():
        expected = (path[name] / ((p.double() - start[name].double()) ** 2 + 0.1)).relu()
        found = si.anchor.precision[name].double()
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-4)
        torch.testing.assert_close(rwalk.fisher[name].double(), squares[name], rtol=1e-4, atol=0)


@each
def test_bfloat16_weights_are_pulled_by_an_anchor_in_float32(name):
    plugin, model = PLUGINS[name](), toy_model().bfloat16()
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    pulls = []

    def before(strategy):  # comes before the plugin
        pulls.append({n: p.grad.float() for n, p in strategy.model.named_parameters()})

    def after(strategy):
        mean, precision = plugin.anchor.mean, plugin.anchor.precision
        for n, p in strategy.model.named_parameters():
            added = 2 * plugin.factor * precision[n] * (weight[n] - mean[n])
            torch.testing.assert_close(p.grad.float(), pulls[-1][n] + added, rtol=0.01, atol=1e-6)

    def remember(strategy):
        weight.update({n: p.float() for n, p in weights(strategy.model).items()})

    weight = {}
    watch = Watch(before_backward=remember, before_update=before)
    plugins = [watch, plugin, Watch(after_update=after)]
    strategy = make_naive(model, sgd(model), *plugins, train_mb_size=8)
    for experience in toy_benchmark(3).train_stream:
        strategy.train(experience)
        assert {p.dtype for p in plugin.anchor.precision.values()} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


# Avalanche's -----------------------------------------------------------------------------


def si_run(*plugins):
    model = toy_model()
    torch.manual_seed(0)
    make_naive(model, sgd(model), *plugins).train(toy_benchmark(2).train_stream)
    return weights(model)


def test_avalanches_si_regularises_where_it_does_nothing_on_a_cpu_by_itself():
    alone = si_run()
    assert same(alone, si_run(SynapticIntelligencePlugin(si_lambda=1e4)))  # a trap of 0.6
    assert not same(alone, si_run(AvalancheSIPlugin(si_lambda=1e4)))


def test_the_importance_of_avalanches_si_is_a_clipped_path_integral():
    """One step of SGD on one batch: -g . dtheta / (dtheta² + eps), at most 1e-3."""
    model = nn.Linear(8, 4)
    start = weights(model)
    plugin = AvalancheSIPlugin(si_lambda=1.0, eps=10.0)
    strategy = make_naive(model, sgd(model), plugin, train_mb_size=48, train_epochs=1)
    experience = toy_benchmark(1).train_stream[0]
    x, y = columns(experience)
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)[0]
    strategy.train(experience)
    moved = model.weight.detach() - start["weight"]
    torch.testing.assert_close(moved, -0.05 * gradient)
    expected = (-gradient * moved / (moved.square() + 10.0)).clamp(max=1e-3)
    assert (expected > 0).any()
    torch.testing.assert_close(plugin.ewc_data[1]["weight"].data, expected.flatten())


def test_a_class_weight_of_zero_is_named_as_a_reason_of_a_fisher_that_is_not_finite():
    model = toy_model()
    strategy = make_naive(model, sgd(model), EWCPlugin(1.0))
    strategy._criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    with pytest.raises(FloatingPointError, match="single examples, as with a class weight of 0"):
        strategy.train(toy_benchmark().train_stream[0])
