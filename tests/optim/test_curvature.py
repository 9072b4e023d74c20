"""Estimators of the curvature: against closed forms, and through the optimizer's steps."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import make_covon, train_step, weights

from covon_avalanche.optim import checks
from covon_avalanche.optim.kernels.formulas import covon_hess
from covon_avalanche.posterior.fisher import squared_example_gradients, track_example_squares

KINDS = ["gradsq", "per_example"]
BOTH = pytest.mark.parametrize("implementation", ["eager", "compiled"])


def regression(n=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, generator=generator), torch.randn(n, generator=generator)


def test_gradsq_expects_what_its_docstring_says():
    """Over all mini-batches of two out of six, with replacement."""
    x, y = regression()
    theta = torch.tensor([0.3, -0.2, 0.5])
    single = (x @ theta - y)[:, None] * x  # gradient of half the squared error
    pairs = itertools.product(range(6), repeat=2)
    estimates = [2 * single[list(pair)].mean(0).square() for pair in pairs]
    mean, square = single.mean(0), single.square().mean(0)
    torch.testing.assert_close(torch.stack(estimates).mean(0), mean.square() + square)


def test_the_noise_of_the_reparametrised_estimate_is_what_the_diagnostics_take():
    """Variance of ``g (theta - mean) / sigma²`` for a loss without curvature."""
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = make_covon([p], ess=50.0, hess_init=0.4, weight_decay=0.2)
    with optimizer.sampled_params():
        (3 * p).sum().backward()
    precision = 50.0 * 0.4 + 50.0 * 0.2
    estimate = optimizer._record.statistic(p) * precision
    assert abs(estimate.mean()) < 5 * 3 * (precision / 20_000) ** 0.5
    assert estimate.var().item() == pytest.approx(9 * precision, rel=5 * (2 / 20_000) ** 0.5)


@BOTH
@pytest.mark.parametrize("mc_samples", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("hess_approx", KINDS)
def test_a_step_with_squares_is_line_8_with_that_estimate(
    hess_approx, scale, mc_samples, implementation
):
    """Also where the gradient is scaled between sample and step, as clipping does."""
    x, y = regression()
    model = nn.Linear(3, 1)
    optimizer = make_covon(
        model.parameters(),
        hess_approx=hess_approx,
        batch_size=6,
        mc_samples=mc_samples,
        betas=(0.0, 0.9),
        implementation=implementation,
    )
    tracked = track_example_squares(model)
    estimates = []
    for _ in range(mc_samples):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (0.5 * (model(x)[:, 0] - y).square()).mean().backward()
            single = (model(x)[:, 0] - y).detach()[:, None] * x
            mean_square = 6 * single.mean(0).square()
            estimates.append(mean_square if hess_approx == "gradsq" else single.square().mean(0))
    for p in model.parameters():
        p.grad.mul_(scale)
    optimizer.step()
    expected = covon_hess(
        torch.full((3,), 0.5), scale**2 * torch.stack(estimates).mean(0), 0.01, 0.9
    )
    torch.testing.assert_close(optimizer.state[model.weight]["hess"][0], expected)
    tracked.remove()
    if hess_approx == "per_example":
        assert not hasattr(model.weight, "example_squares")
        model(x).sum().backward()
        assert not hasattr(model.weight, "example_squares")


class Convolutions(nn.Module):
    """With an activation in place, as Avalanche's and torchvision's models have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
        )

    def forward(self, x):
        return self.layers(x)


def test_tracked_squares_are_the_exact_ones_over_all_backward_passes():
    model = Convolutions()
    x, y = torch.randn(10, 2, 4, 4), torch.randint(3, (10,))
    tracked = track_example_squares(model)
    for rows in (slice(0, 7), slice(7, 10)):
        F.cross_entropy(model(x[rows]), y[rows]).backward()
    tracked.remove()
    exact = squared_example_gradients(model, [(x, y)])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.example_squares, exact[name])


def test_squares_of_a_sample_that_was_dropped_do_not_count(linear, batch):
    optimizer = make_covon(linear.parameters(), hess_approx="per_example")
    tracked = track_example_squares(linear)
    with optimizer.sampled_params():
        F.cross_entropy(100 * linear(batch[0]), batch[1]).backward()
    optimizer.zero_grad()
    with optimizer.sampled_params():
        F.cross_entropy(linear(batch[0]), batch[1]).backward()
        tracked.remove()
        exact = squared_example_gradients(linear, [batch])
    torch.testing.assert_close(linear.weight.example_squares, exact["weight"])


def test_what_is_missing_is_named(linear, batch):
    optimizer = make_covon(linear.named_parameters(), hess_approx="per_example")
    with pytest.raises(RuntimeError, match=r"no squared gradients for 'weight': call .*track"):
        train_step(optimizer, linear, batch)
    optimizer = make_covon(linear.named_parameters(), hess_approx="gradsq")
    with pytest.raises(ValueError, match="give batch_size="):
        train_step(optimizer, linear, batch)
    with pytest.raises(ValueError, match=r"hess_approx must be one of .* got 'bonnet'"):
        make_covon(linear.parameters(), hess_approx="bonnet")
    with pytest.raises(ValueError, match="hess_approx must be the same in all groups"):
        groups = [
            {"params": [p], "hess_approx": k}
            for p, k in zip(linear.parameters(), KINDS, strict=True)
        ]
        make_covon(groups)
    with pytest.raises(ValueError, match=r"not for those of \['1 \(LayerNorm\)'\]"):
        track_example_squares(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_auto_takes_squares_and_assumes_a_batch_size_that_nobody_tells(linear, batch):
    runs = []
    for options in (
        {"hess_approx": "auto"},
        {"hess_approx": "gradsq", "batch_size": 128},
        {"hess_approx": "auto", "batch_size": 16},
        {"hess_approx": "gradsq", "batch_size": 16},
    ):
        model = copy.deepcopy(linear)
        optimizer = make_covon(model.parameters(), **options)
        for _ in range(3):
            train_step(optimizer, model, batch)
        runs.append(optimizer.state[model.weight]["hess"])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"hess_approx": "reparam"}, False), ({"batch_size": 16}, False)],
)
def test_who_lets_it_choose_and_gives_no_batch_size_is_told(linear, batch, options, warns):
    """Once a task, and Python shows the same warning once."""
    optimizer = make_covon(linear.parameters(), **{"hess_approx": "auto", **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            train_step(optimizer, linear, batch)
    said = [w for w in caught if "give batch_size=" in str(w.message)]
    assert len(said) == warns
    assert all("toys.py" in w.filename for w in said)


def test_a_layer_used_twice_is_refused():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    track_example_squares(model)
    with pytest.raises(ValueError, match="each layer to be called once"):
        model(torch.randn(4, 3))


@BOTH
def test_an_estimate_too_large_for_float32_is_refused_whole(linear, batch, implementation):
    optimizer = make_covon(
        linear.parameters(), hess_approx="gradsq", batch_size=8, implementation=implementation
    )
    train_step(optimizer, linear, batch)
    before = weights(linear)
    with optimizer.sampled_params():
        optimizer.zero_grad()
        (1e18 * linear(batch[0])).sum().backward()
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(before[n], p) for n, p in linear.named_parameters())


@BOTH
@pytest.mark.parametrize("gradient", [1e3, 1e6, 1e8])
def test_squared_gradients_of_any_size_that_float32_can_hold(gradient, implementation):
    """Small ones in one pass over memory, large ones with a look before anything is changed."""
    p = nn.Parameter(torch.zeros(5))
    optimizer = make_covon(
        [p], hess_approx="gradsq", batch_size=8, implementation=implementation, betas=(0.9, 0.75)
    )
    with optimizer.sampled_params():
        (gradient * p).sum().backward()
    optimizer.step()
    change = 0.25 * (8 * gradient**2 - 0.5)  # hess_init 0.5, weight_decay 0.01
    expected = 0.5 + change + 0.5 * change**2 / (0.5 + 0.01)
    torch.testing.assert_close(optimizer.state[p]["hess"], torch.full((5,), expected))


@pytest.mark.parametrize("size", [0, -3, float("nan")])
def test_a_batch_size_that_is_none_is_refused(linear, batch, size):
    optimizer = make_covon(linear.parameters(), hess_approx="gradsq", batch_size=8)
    optimizer.param_groups[0]["batch_size"] = size
    with pytest.raises(ValueError, match="batch_size must be > 0 and finite"):
        train_step(optimizer, linear, batch)


class TestDiagnostics:
    """Four numbers."""

    def test_numbers_by_hand(self):
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = make_covon(
            [p], ess=10.0, hess_init=1.0, weight_decay=0.5, betas=(0.5, 0.8), debias=False
        )
        assert optimizer.diagnostics() == {}
        optimizer.state[p] = {
            "step": 1,
            "momentum": torch.tensor([3.0, 4.0]),
            "hess": torch.tensor([1.05, 3.0]),
        }
        p.grad = torch.tensor([1.0, 2.0])
        found = optimizer.diagnostics()
        assert found["all"] == found["0.0"]
        precision = (15.5, 35.0)
        noise = (1 * precision[0] + 4 * precision[1]) * 0.2 / 1.8 * (1 - 0.64)
        assert found["all"].hess_signal_to_noise == pytest.approx(
            ((0.25**2 + 2.2**2) / noise) ** 0.5, rel=1e-5
        )
        assert found["all"].hess_at_start == 0.5
        assert found["all"].prior_pull == pytest.approx((0.5**2 * 5 / 25) ** 0.5)
        assert found["all"].noise_to_weights == pytest.approx(
            ((1 / precision[0] + 1 / precision[1]) / 5) ** 0.5
        )
        p.grad = None
        assert found["all"].hess_signal_to_noise != optimizer.diagnostics()["all"][0]

    @pytest.mark.parametrize("hess_init", [0.01, 10.0])
    def test_hess_of_pure_noise_has_a_signal_to_noise_of_one(self, hess_init):
        """Gradients of random sign, no curvature; hess_init far below the noise, and above."""
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.zeros(20_000))
        optimizer = make_covon([p], ess=1e3, lr=0.0, hess_init=hess_init, betas=(0.9, 0.99))
        optimizer.param_groups[0]["weight_decay"] = 100.0  # keeps the precision as it is
        for _ in range(100):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                signs = torch.randint(2, p.shape, generator=generator) * 2.0 - 1
                (0.01 * signs * p).sum().backward()
            optimizer.step()
        assert optimizer.diagnostics()["all"].hess_signal_to_noise == pytest.approx(1, abs=0.05)

    @pytest.mark.parametrize(("beta2", "warns"), [(0.99999, True), (0.9, False)])
    def test_a_precision_that_is_not_learned_is_said(self, linear, batch, beta2, warns):
        optimizer = make_covon(linear.parameters(), betas=(0.9, beta2))
        for _ in range(100):
            train_step(optimizer, linear, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.consolidate()
        assert any("has not learned its precision" in str(w.message) for w in caught) == warns


class TestConsolidation:
    """The ablations of Figure 2b."""

    def trained(self, linear, batch, kind):
        optimizer = make_covon(linear.parameters(), consolidation=kind, gamma=0.7)
        for _ in range(2):
            for _ in range(3):
                train_step(optimizer, linear, batch)
            state = {k: v for k, v in optimizer.state[linear.weight].items() if k != "step"}
            before = {"m": linear.weight.detach(), **state}
            before = {k: v.clone() for k, v in before.items()}
            optimizer.consolidate()
        return optimizer, before

    def test_ema_averages_means_without_the_precision(self, linear, batch):
        optimizer, old = self.trained(linear, batch, "ema")
        mean = 0.3 * old["prior_mean"] + 0.7 * old["m"]
        torch.testing.assert_close(linear.weight.detach(), mean)
        precision = old["prior_precision"] + 0.7 * 100 * old["hess"]
        torch.testing.assert_close(optimizer.state[linear.weight]["prior_precision"], precision)

    def test_replace_keeps_the_last_task_alone(self, linear, batch):
        optimizer, old = self.trained(linear, batch, "replace")
        torch.testing.assert_close(linear.weight.detach(), old["m"])
        expected = 100 * old["hess"].clamp(min=0) + 1.0
        torch.testing.assert_close(optimizer.state[linear.weight]["prior_precision"], expected)

    def test_none_is_one_long_task(self, linear, batch):
        optimizer, _ = self.trained(linear, batch, "none")
        state = optimizer.state[linear.weight]
        assert state["step"] == 6
        assert "prior_mean" not in state


def test_diagnostics_of_a_large_parameter_are_those_of_its_whole():
    """It is read block by block."""
    p = nn.Parameter(torch.randn(2**17 + 5))
    optimizer = make_covon([p], betas=(0.9, 0.9))
    for _ in range(3):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            p.square().sum().backward()
        optimizer.step()
    state, found = optimizer.state[p], optimizer.diagnostics()["all"]
    hess, mean = state["hess"].double(), p.detach().double()
    precision = 100 * hess + 1.0
    noise = (p.grad.double().square() * precision).sum() * 0.1 / 1.9 * (1 - 0.9**6)
    signal = (hess - 0.9**3 * 0.5).square().sum()
    assert found.hess_signal_to_noise == pytest.approx((signal / noise).sqrt().item(), rel=1e-4)
    momentum = state["momentum"].double() / (1 - 0.9**3)
    pull = ((0.01 * mean).square().sum() / momentum.square().sum()).sqrt()
    assert found.prior_pull == pytest.approx(pull.item(), rel=1e-4)


def test_a_group_may_come_later_without_a_batch_size(linear, batch):
    optimizer = make_covon([linear.weight], hess_approx="auto", batch_size=16)
    optimizer.param_groups[0]["batch_size"] = 8
    optimizer.add_param_group({"params": [linear.bias]})
    train_step(optimizer, linear, batch)
    assert optimizer.hess_approx == "gradsq"


def test_squares_of_one_process_only_are_refused(linear, monkeypatch):
    monkeypatch.setattr(checks, "_several_processes", lambda: True)
    with pytest.raises(ValueError, match=r"'per_example' does not work in distributed training"):
        make_covon(linear.parameters(), hess_approx="per_example")
