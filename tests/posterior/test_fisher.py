"""Squared gradients, against a loop over single examples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from avalanche.models import SimpleMLP
from torch import nn

from covon_avalanche.posterior import fisher
from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients


class SequenceModel(nn.Module):
    """A Linear layer applied at several places of each example."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x.view(len(x), -1, 3))).mean(1))


class SharedLayer(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(72, 72), nn.Linear(72, 4)

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.layer(x.flatten(1)))))


class TaskModel(nn.Module):
    """Takes task labels, as Avalanche's multi-head models do."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(12, 8)

    def forward(self, x, task):
        out = self.heads(x.flatten(1)).view(len(x), 2, 4)
        return torch.where(task[:, None] == 0, out[:, 0], out[:, 1])


class TimeFirst(nn.Module):
    """The rows of the inner layer are not examples: places come first."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        rows = x.reshape(len(x), -1, 3).transpose(0, 1)
        return self.head(torch.tanh(self.inner(rows)).mean(0))


class Flattened(SequenceModel):
    """Examples and places in one dimension."""

    def forward(self, x):
        rows = self.inner(x.reshape(-1, 3)).unflatten(0, (len(x), -1))
        return self.head(torch.tanh(rows).mean(1))


class Functional(SequenceModel):
    """Uses a layer's weight without calling the layer."""

    def forward(self, x):
        rows = F.linear(x.view(len(x), -1, 3), self.inner.weight, self.inner.bias)
        return self.head(torch.tanh(rows).mean(1))


def conv(**options):
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4, bias=False)
    )


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.Tanh(), nn.Linear(7, 4)),
    "in place": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(96, 9),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(9, 4),
    ),
    "avalanche mlp": lambda: SimpleMLP(num_classes=4, input_size=72, hidden_size=9),
    "sequence": SequenceModel,
    "time first": TimeFirst,
    "flattened": Flattened,
    "functional": Functional,
    "shared": SharedLayer,
    "conv": lambda: conv(padding=1),
    "conv strided dilated grouped": lambda: conv(stride=2, dilation=2, padding=2, groups=2),
    "conv same": lambda: conv(padding="same"),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 4)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)
    ),
}
BY_FUNC_AT_ONCE = {"conv same", "layer norm", "batch norm"}
ON_SECOND_THOUGHT = {"time first", "flattened", "functional", "shared"}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def case(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().double()
    x, y = torch.randn(7, 2, 6, 6).double(), torch.randint(4, (7,))
    model(x)  # lazy layers, and statistics of the batch normalisation
    return request.param, model, x, y


def by_loop(model, x, y, criterion=F.cross_entropy):
    """One backward pass per example, in eval mode."""
    model = copy.deepcopy(model).eval()
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(y)):
        model.zero_grad()
        criterion(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.square()
    return {name: value / len(y) for name, value in sums.items()}


@pytest.mark.parametrize("sizes", [[7], [3, 4], [1] * 7])
def test_exact_squares_equal_the_loop_whatever_the_batches(case, sizes):
    _, model, x, y = case
    batches = zip(x.split(sizes), y.split(sizes), strict=True)
    exact = squared_example_gradients(model, batches)
    for name, expected in by_loop(model, x, y).items():
        torch.testing.assert_close(exact[name], expected)


def test_plain_layers_go_by_hooks_and_the_rest_by_torch_func(case, monkeypatch):
    name, model, x, y = case
    by_func = []
    original = fisher._add_by_func

    def spy(*arguments):
        by_func.append(arguments)
        original(*arguments)

    monkeypatch.setattr(fisher, "_add_by_func", spy)
    squared_example_gradients(model, [(x, y)])
    assert bool(by_func) == (name in BY_FUNC_AT_ONCE | ON_SECOND_THOUGHT)
    assert fisher._supports_hooks(model) == (name not in BY_FUNC_AT_ONCE)


def test_chunking_changes_nothing(case, monkeypatch):
    _, model, x, y = case
    whole = squared_example_gradients(model, [(x, y)])
    monkeypatch.setattr(fisher, "_CHUNK", 1)
    torch.testing.assert_close(squared_example_gradients(model, [(x, y)]), whole)


def test_batch_squares_times_the_batch_size(case):
    """Algorithm 3: B times the average of squared batch gradients; B = 1 is exact."""
    _, model, x, y = case
    single = squared_batch_gradients(model, zip(x.split(1), y.split(1), strict=True))
    torch.testing.assert_close(single, by_loop(model, x, y))
    model.eval()
    x, y = x[:6], y[:6]
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for xs, ys in zip(x.split(3), y.split(3), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(xs), ys), list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += 3 * gradient.square() / 2
    batched = squared_batch_gradients(model, zip(x.split(3), y.split(3), strict=True))
    torch.testing.assert_close(batched, expected)


@pytest.mark.parametrize("function", [squared_batch_gradients, squared_example_gradients])
class TestBoth:
    def test_training_flags_gradients_and_statistics_stay_as_they_were(self, function):
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        model.train()
        model[2].eval()
        model[1].weight.grad = torch.ones_like(model[1].weight)
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():  # also works where gradients are off
            function(model, [(torch.randn(6, 2, 6, 6), torch.randint(4, (6,)))])
        assert [m.training for m in model] == [True, True, False, True]
        assert (model[1].weight.grad == 1).all()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    def test_eval_mode_is_the_default_and_training_mode_a_choice(self, function):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 30), nn.Dropout(0.9), nn.Linear(30, 4))
        data = [(torch.randn(6, 12), torch.randint(4, (6,)))]
        first, second = function(model, data), function(model, data)
        torch.testing.assert_close(first, second)
        dropped = function(model, data, train_mode=True)
        assert not torch.allclose(dropped["2.weight"], first["2.weight"])

    def test_frozen_parameters_are_left_out(self, function):
        model = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 4))
        model[0].requires_grad_(False)
        result = function(model, [(torch.randn(6, 12), torch.randint(4, (6,)))])
        assert set(result) == {"1.weight", "1.bias"}

    def test_task_labels_are_handed_to_the_model(self, function):
        model = TaskModel()
        x, y, t = torch.randn(6, 12), torch.randint(4, (6,)), torch.tensor([0, 0, 0, 0, 0, 0])
        result = function(model, [(x, y, t)])["heads.bias"]
        assert (result[:4] > 0).all()
        assert (result[4:] == 0).all()

    def test_no_data_is_an_error(self, function):
        with pytest.raises(ValueError, match="at least one example"):
            function(nn.Linear(2, 2), [])


def test_as_many_places_as_examples_are_not_confused():
    torch.manual_seed(0)
    model = TimeFirst().double()
    x, y = torch.randn(4, 12).double(), torch.randint(4, (4,))
    torch.testing.assert_close(squared_example_gradients(model, [(x, y)]), by_loop(model, x, y))


def test_a_parameter_shared_by_two_layers_goes_by_torch_func():
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 4))
    model[2].weight = model[0].weight
    model.double()
    x, y = torch.randn(5, 12).double(), torch.randint(4, (5,))
    exact = squared_example_gradients(model, [(x, y)])
    torch.testing.assert_close(exact, by_loop(model, x, y))


class Heads(nn.Module):
    """A head for each task, as Avalanche's MTSimpleMLP has them: the others are idle."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 4) for _ in range(2)])

    def forward(self, x, task):
        return self.heads[int(task.unique().item())](torch.tanh(self.body(x)))


def test_heads_of_other_tasks_have_no_fisher_information():
    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(6, 12), torch.arange(6) % 4
    task = torch.ones(6, dtype=torch.long)
    found = squared_example_gradients(model, [(x, y, task)])
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(6):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1], task[:1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                expected[name] += p.grad.square() / 6
    assert (found["heads.0.weight"] == 0).all()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
