"""Squared gradients, against a loop over single examples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from covon_avalanche.posterior import fisher
from covon_avalanche.posterior.fisher import (
    absolute_example_gradients,
    expected_squared_gradients,
    squared_batch_gradients,
    squared_example_gradients,
)


class SequenceModel(nn.Module):
    """A Linear layer applied at several positions of each example."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x.view(len(x), -1, 3))).mean(1))


class TimeFirst(SequenceModel):
    """The rows of the inner layer are not examples: positions come first."""

    def forward(self, x):
        rows = x.reshape(len(x), -1, 3).transpose(0, 1)
        return self.head(torch.tanh(self.inner(rows)).mean(0))


class Flattened(SequenceModel):
    """Examples and positions in one dimension."""

    def forward(self, x):
        rows = self.inner(x.reshape(-1, 3)).unflatten(0, (len(x), -1))
        return self.head(torch.tanh(rows).mean(1))


class Functional(SequenceModel):
    """Uses a layer's weight without calling the layer."""

    def forward(self, x):
        rows = F.linear(x.view(len(x), -1, 3), self.inner.weight, self.inner.bias)
        return self.head(torch.tanh(rows).mean(1))


class Rescaled(SequenceModel):
    """Uses a layer's weight in its call and once more before the next layer."""

    def forward(self, x):
        rows = torch.tanh(self.inner(x.view(len(x), -1, 3))).mean(1)
        return self.head(rows * self.inner.weight.norm())


class Normalised(SequenceModel):
    """Uses the last layer's weight in its call and once more for the output."""

    def forward(self, x):
        return super().forward(x) / self.head.weight.norm()


class ByKeyword(SequenceModel):
    """Calls a layer with a named argument."""

    def forward(self, x):
        return self.head(input=torch.tanh(self.inner(x.view(len(x), -1, 3))).mean(1))


class Masked(SequenceModel):
    """The shape of an intermediate result depends on the data, which ``torch.func`` refuses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(super().forward(x[x.flatten(1).norm(dim=1) > 0]))


class Detached(SequenceModel):
    """Runs a layer that is trained elsewhere without gradients."""

    def forward(self, x):
        with torch.no_grad():
            rows = torch.tanh(self.inner(x.view(len(x), -1, 3)))
        return self.head(rows.mean(1))


class Recurrent(nn.Module):
    """Of a layer whose in-place updates ``torch.func`` refuses."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.layer(x.view(len(x), -1, 3))[0][:, -1])


def shared_layer():
    layer = nn.Linear(72, 72)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(72, 4))


def tied_weights():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 72))
    model[3].weight = model[1].weight
    return nn.Sequential(model, nn.Linear(72, 4))


def hooked():
    """A hook changes a layer's output."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.Tanh(), nn.Linear(7, 4))
    model[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return model


def conv(*layers, outputs, **options):
    conv = nn.Conv2d(2, 6, 3, **options)
    return nn.Sequential(conv, *layers, nn.Flatten(), nn.Linear(outputs, 4, bias=False))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.Tanh(), nn.Linear(7, 4)),
    "in place": lambda: nn.Sequential(
        conv(nn.ReLU(inplace=True), outputs=96), nn.ReLU(inplace=True), nn.Dropout(0.5)
    ),
    "sequence": SequenceModel,
    "keyword": ByKeyword,
    "conv": lambda: conv(nn.ReLU(), padding=1, outputs=216),
    "conv dilated": lambda: conv(stride=2, dilation=2, padding=2, groups=2, outputs=54),
    "time first": TimeFirst,
    "flattened": Flattened,
    "functional": Functional,
    "rescaled": Rescaled,
    "normalised": Normalised,
    "masked": Masked,
    "without gradients": Detached,
    "hooked": hooked,
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "shared": shared_layer,
    "tied": tied_weights,
    "conv same": lambda: conv(padding="same", outputs=216),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 4)),
    "batch norm": lambda: conv(nn.BatchNorm2d(6), outputs=96),
}
BOTH = [squared_batch_gradients, squared_example_gradients]
BY_HOOKS = {"mlp", "hooked", "in place", "sequence", "keyword", "conv", "conv dilated"}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def case(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().double()
    x, y = torch.randn(7, 2, 6, 6).double(), torch.randint(4, (7,))
    model(x)  # statistics of the batch normalisation
    return request.param, model, x, y


def by_loop(model, x, y, *more, size=torch.square, criterion=F.cross_entropy):
    """One backward pass per example, in eval mode."""
    model = copy.deepcopy(model).eval()
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(y)):
        model.zero_grad()
        criterion(model(*(part[i : i + 1] for part in (x, *more))), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += size(p.grad) / len(y)
    return sums


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_a_layer_computes_from_parameters_of_its_own_are_exact():
    torch.manual_seed(0)
    layer = nn.utils.weight_norm(nn.Linear(5, 4))
    x, y = torch.randn(6, 5), torch.randint(4, (6,))
    found = squared_example_gradients(layer, [(x, y)])
    for name, p in layer.named_parameters():
        rows = [
            torch.autograd.grad(F.cross_entropy(layer(x[i : i + 1]), y[i : i + 1]), p)[0].square()
            for i in range(6)
        ]
        torch.testing.assert_close(found[name], torch.stack(rows).mean(0))


@pytest.mark.parametrize(
    ("function", "size"),
    [(squared_example_gradients, torch.square), (absolute_example_gradients, torch.abs)],
)
def test_sizes_are_the_loops_in_all_batches_and_chunks(case, function, size, monkeypatch):
    _, model, x, y = case
    expected = by_loop(model, x, y, size=size)
    for sizes, chunk in (([7], fisher._CHUNK), ([3, 4], 1)):
        batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
        monkeypatch.setattr(fisher, "_CHUNK", chunk)
        found = function(model, batches, F.cross_entropy)
        torch.testing.assert_close(found, expected)
    assert len(list(model.parameters())) == len(expected)  # functional_call may replace them


def test_the_expectation_over_predicted_labels_is_the_weighted_sum_over_all_labels(case):
    _, model, x, y = case
    x, y = x[:3], y[:3]
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    p = copy.deepcopy(model).eval()(x).softmax(1).detach()
    for i in range(len(y)):
        for label in range(4):
            one = by_loop(model, x[i : i + 1], torch.tensor([label]))
            expected = {n: e + p[i, label] * one[n] / len(y) for n, e in expected.items()}
    batches = list(zip(x.split(2), y.split(2), strict=True))
    torch.testing.assert_close(expected_squared_gradients(model, batches), expected)


def test_many_classes_have_drawn_labels_the_same_each_time(monkeypatch):
    """The mean over many examples is near the exact expectation."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(1, 3).expand(4000, 3), torch.zeros(4000)
    exact = expected_squared_gradients(model, [(x, y)])
    monkeypatch.setattr(fisher, "_MOST_PASSES", 2)
    found = [expected_squared_gradients(model, [(x, y)]) for _ in range(2)]
    for name, value in exact.items():
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], value)
        torch.testing.assert_close(found[0][name], value, rtol=0.05, atol=1e-3)


def test_outputs_that_are_no_logits_of_examples_have_no_predicted_labels():
    for width, shape in ((4, r"\(2, 3, 4\)"), (1, r"\(2, 1\)")):
        x = torch.randn(2, 5) if width == 1 else torch.randn(2, 3, 5)
        with pytest.raises(ValueError, match=rf"logits of shape \(batch, classes\), got {shape}"):
            expected_squared_gradients(nn.Linear(5, width), [(x, torch.zeros(2))])


def test_plain_layers_go_by_hooks_and_the_rest_by_torch_func(case, monkeypatch):
    name, model, x, y = case
    by_func = []
    monkeypatch.setattr(fisher, "_add_by_func", lambda *given: by_func.append(given))
    squared_example_gradients(model, [(x, y)])
    assert bool(by_func) == (name not in BY_HOOKS)


def test_batch_squares_times_the_batch_size(case):
    """Algorithm 3: B times the average of squared batch gradients; B = 1 is exact."""
    _, model, x, y = case
    single = squared_batch_gradients(model, zip(x.split(1), y.split(1), strict=True))
    torch.testing.assert_close(single, by_loop(model, x, y))
    model.eval()
    batches = list(zip(x[:6].split(3), y[:6].split(3), strict=True))
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for xs, ys in batches:
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(xs), ys).backward()
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += 3 * gradient.square() / 2
    torch.testing.assert_close(squared_batch_gradients(model, batches), expected)


@pytest.mark.parametrize("function", [*BOTH, expected_squared_gradients])
def test_sums_over_many_batches_of_bfloat16_weights_keep_growing(function):
    """Sums in bfloat16 stop at 256 times what a batch adds."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    data = torch.randn(4, 4).bfloat16(), torch.tensor([0, 1, 2, 0])
    once, often = function(model, [data]), function(model, [data] * 300)
    torch.testing.assert_close(often, once)
    assert {value.dtype for value in often.values()} == {torch.bfloat16}


class Heads(nn.Module):
    """A head for each task, as Avalanche's MTSimpleMLP has them: the others are idle."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 4) for _ in range(2)])

    def forward(self, x, task):
        return self.heads[int(task.unique().item())](torch.tanh(self.body(x)))


@pytest.mark.parametrize("function", BOTH)
class TestBoth:
    def test_training_flags_gradients_and_statistics_stay_as_they_were(self, function):
        model = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Dropout(0.9), nn.Linear(5, 4))
        model.train()
        model[1].eval()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        before, data = copy.deepcopy(model.state_dict()), (torch.randn(6, 12), torch.arange(6) % 4)
        with torch.no_grad():  # also works where gradients are off
            first, second = function(model, [data]), function(model, [data])
        torch.testing.assert_close(first, second)  # without dropout
        assert [m.training for m in model] == [True, False, True, True]
        assert (model[0].weight.grad == 1).all()
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)

    def test_frozen_parameters_are_left_out(self, function):
        model = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 4))
        model[0].requires_grad_(False)
        result = function(model, [(torch.randn(6, 12), torch.randint(4, (6,)))])
        assert set(result) == {"1.weight", "1.bias"}

    def test_heads_of_other_tasks_have_no_fisher_information(self, function):
        """The model is given task labels."""
        torch.manual_seed(0)
        model = Heads()
        data = torch.randn(6, 12), torch.arange(6) % 4, torch.ones(6, dtype=torch.long)
        found = function(model, zip(*(part.split(1) for part in data), strict=True))
        assert (found["heads.0.weight"] == 0).all()
        torch.testing.assert_close(found, by_loop(model, *data))

    def test_no_data_is_an_error(self, function):
        with pytest.raises(ValueError, match="at least one example"):
            function(nn.Linear(2, 2), [])


def test_as_many_positions_as_examples_are_not_confused():
    torch.manual_seed(0)
    model = TimeFirst().double()
    x, y = torch.randn(4, 12).double(), torch.randint(4, (4,))
    torch.testing.assert_close(squared_example_gradients(model, [(x, y)]), by_loop(model, x, y))


class ClassEmbeddings(nn.Module):
    """Compares features with projected embeddings of the classes."""

    def __init__(self):
        super().__init__()
        self.body, self.project = nn.Linear(12, 5), nn.Linear(3, 5, bias=False)
        self.register_buffer("embeddings", torch.randn(4, 3))

    def forward(self, x):
        return torch.tanh(self.body(x)) @ self.project(self.embeddings).T


def test_as_many_classes_as_examples_are_not_confused():
    torch.manual_seed(0)
    model = ClassEmbeddings().double()
    x, y = torch.randn(7, 12).double(), torch.randint(4, (7,))
    for size in (7, 4, 1):  # 4 examples and 4 classes, and an incomplete batch
        batches = zip(x.split(size), y.split(size), strict=True)
        torch.testing.assert_close(squared_example_gradients(model, batches), by_loop(model, x, y))


class NeedsWholeBatch(nn.Module):
    """Has a buffer with a row per example, and takes a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.register_buffer("offsets", torch.randn(6, 12))

    def forward(self, x, scale):
        return scale * self.layer(x + self.offsets)


def test_a_network_that_needs_the_whole_batch():
    torch.manual_seed(0)
    model = NeedsWholeBatch().double()
    x, y = torch.randn(6, 12).double(), torch.randint(4, (6,))
    losses = nn.functional.cross_entropy(model(x, 2.0), y, reduction="none")
    weight = model.layer.weight
    squares = [torch.autograd.grad(loss, weight, retain_graph=True)[0].square() for loss in losses]
    found = squared_example_gradients(model, [(x, y, 2.0)])
    torch.testing.assert_close(found["layer.weight"], torch.stack(squares).mean(0))


LOSSES = {
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0, 3.0])),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_an_examples_loss_is_that_of_a_batch_of_it_alone(name, normalised):
    """Whatever the architecture and the batch size."""
    torch.manual_seed(0)
    middle = nn.LayerNorm(5) if normalised else nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 5), middle, nn.Linear(5, 4))
    x, y = torch.randn(12, 3), torch.arange(12) % 4
    used = y != (1 if name == "ignored" else -1)
    expected = by_loop(model, x[used], y[used], criterion=LOSSES[name])
    expected = {n: value * used.sum() / 12 for n, value in expected.items()}
    for size in (1, 5, 12):
        batches = zip(x.split(size), y.split(size), strict=True)
        found = squared_example_gradients(model, batches, LOSSES[name])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_a_batch_gradient_of_a_sum_is_refused():
    model, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.arange(6) % 4
    for criterion in (LOSSES["sum"], lambda o, t: F.cross_entropy(o, t, reduction="sum")):
        with pytest.raises(ValueError, match="average over the batch, got one that sums"):
            squared_batch_gradients(model, [(x, y)], criterion)
