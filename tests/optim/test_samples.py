"""Posterior samples: noise as a function of seed, draw and number; memory layouts; what samples
leave behind for a step."""

import copy
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numba
import pytest
import torch
from numba.core.caching import CacheImpl
from scipy import stats
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from toy_optimizers import make_covon, make_vcl, same, train_step, weights

from covon_avalanche import DiagGaussian, optim
from covon_avalanche.optim import noise, samples  # noqa: F401
from covon_avalanche.optim.samples import (
    SampleAccumulator,
    SampleBuffer,
    fill_normal_,
    is_dense,
    match_layout,
    noise_key,
)


@contextmanager
def without_numba():
    with (
        mock.patch("covon_avalanche.optim.samples.compiled_fill", return_value=None),
        mock.patch("covon_avalanche.optim.covon.compiled_fill", return_value=None),
    ):
        yield


@pytest.fixture(params=["numba", "torch"])
def source(request):
    """With numba and without."""
    if request.param == "numba":
        yield request.param
        return
    with without_numba():
        yield request.param


def filled(out, key=5, number=7):
    assert fill_normal_(out, key, number) is out
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standard_normals_that_depend_on_key_and_number_alone(source, dtype):
    pairs = [(key, number) for key in (5, 2**64 - 3) for number in (0, 1, 2**31)]
    torch.manual_seed(0)
    z = [filled(torch.empty(3000, dtype=dtype), *pair) for pair in pairs]
    torch.manual_seed(1)
    assert torch.equal(z[-1], filled(torch.empty(3000, dtype=dtype), *pairs[-1]))
    assert stats.kstest(torch.cat(z), "norm").pvalue > 1e-4
    for i, a in enumerate(z):
        for b in z[:i]:
            assert abs((a * b).mean()) < 5 / 3000**0.5


def test_layouts(source):
    """Gaps are left alone. With numba the order is that of memory, and with gaps of entries."""
    shape = (5, 4, 6, 6)
    plain = filled(torch.empty(shape)).flatten()
    if source == "numba":
        last = filled(torch.empty(shape).to(memory_format=torch.channels_last))
        assert torch.equal(last.permute(0, 2, 3, 1).flatten(), plain)
    for dtype in (torch.float32, torch.float64):
        wide = torch.zeros(5, 4, 6, 12, dtype=dtype)
        alone = filled(torch.empty(shape, dtype=dtype))
        assert filled(wide[..., ::2]).ne(0).all()
        if source == "numba":
            assert torch.equal(wide[..., ::2], alone)
        assert not wide[..., 1::2].any()
    assert filled(torch.empty(())).isfinite()
    assert filled(torch.empty(0, 3)).numel() == 0


@pytest.mark.parametrize(
    ("p", "dense"),
    [
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(1, 5)[:, :3], True),
        (torch.empty(4, 5)[:, :3], False),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(3, 1).expand(3, 4), False),
    ],
)
def test_is_dense(p, dense):
    assert is_dense(p) == dense


def test_keys_of_seeds_and_draws_differ():
    keys = {noise_key(seed, draw) for seed in range(100) for draw in range(100)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("trouble", ["not installed", "no folder", "switched off"])
def test_where_numba_does_not_work_torch_does(trouble, monkeypatch):
    """No folder for its files: as in a container without a home."""
    if trouble == "not installed":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif trouble == "no folder":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(optim, "noise", optim.noise)  # put back afterwards
    monkeypatch.delitem(sys.modules, "covon_avalanche.optim.noise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = samples.compiled_fill.__wrapped__()
    assert found is None
    told = ["numba does not work here" in str(w.message) for w in caught]
    assert told == ([True] if trouble == "no folder" else [])
    with without_numba():
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = optim.CoVON([p], ess=9.0, batch_size=4)
        for _ in range(2):
            with optimizer.sampled_params():
                p.sum().backward()
            optimizer.step()
        assert (p < 1).all()


each = pytest.mark.parametrize("make", [make_covon, make_vcl])


@each
def test_outside_the_parameter_lies_where_it_lay(make, linear, batch):
    """Views taken before go on showing the mean."""
    optimizer, address = make(linear.parameters()), linear.weight.data_ptr()
    view = linear.weight.data
    for _ in range(2):
        train_step(optimizer, linear, batch)
        with optimizer.sampled_params():
            assert torch.equal(view, optimizer.posterior().mean["0.0"])
            assert not torch.equal(view, linear.weight)
        optimizer.discard_samples()
        assert linear.weight.data_ptr() == address
        assert torch.equal(view, linear.weight)


@each
def test_a_backward_pass_through_the_sample_after_its_end_is_an_error(make, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = make(model.parameters())
    with optimizer.sampled_params():
        loss = model(batch[0]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each
@pytest.mark.parametrize("how", ["shared memory", "a piece of a flattened model"])
def test_memory_that_others_see_is_written_to(make, how):
    """Other processes, or the flattened model, see the sample too, and the mean afterwards."""
    flat = torch.arange(20.0)
    p = nn.Parameter(flat[4:16].view(3, 4) if how.startswith("a piece") else torch.ones(3, 4))
    if how == "shared memory":
        p.data.share_memory_()
    address, before = p.data_ptr(), p.detach().clone()
    optimizer = make([p])
    with optimizer.sampled_params():
        assert p.data_ptr() == address
        assert not torch.equal(p, before)
        if how.startswith("a piece"):
            assert torch.equal(flat[4:16].view(3, 4), p)
            assert torch.equal(flat[:4], torch.arange(4.0))
        p.square().sum().backward()
    assert torch.equal(p, before)
    optimizer.step()
    assert p.data_ptr() == address
    assert not torch.equal(p, before)


@each
def test_a_sample_that_waits_for_its_step_survives_a_prediction(make, linear, batch):
    optimizer = make(linear.parameters())
    train_step(optimizer, linear, batch)
    with optimizer.sampled_params():
        optimizer.zero_grad()
        nn.functional.cross_entropy(linear(batch[0]), batch[1]).backward()
    model, other = copy.deepcopy((linear, optimizer))
    # A copy forgets samples: draw the same one again.
    other.param_groups[0]["noise_draws"] -= 1
    with other.sampled_params():
        other.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    with optimizer.sampled_params(train=False):
        linear(batch[0])
    for o in (optimizer, other):
        o.step()
    assert same(weights(linear), weights(model))


CHANGES = {
    "double": lambda model: model.double(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
EACH_OPTIMIZER = {
    implementation: partial(
        make_covon, implementation=implementation, hess_approx="gradsq", batch_size=16
    )
    for implementation in ("compiled", "reference", "foreach")
} | {"vcl": partial(make_vcl, std_init=1e-6, inner="sgd", lr=0.1)}


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))


def sample(optimizer, model):
    """A sample with the gradients of a loss."""
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with optimizer.sampled_params():
        optimizer.zero_grad()
        out = model(x.to(model[0].weight.dtype))
        nn.functional.cross_entropy(out, torch.arange(16) % 4).backward()


def two_tasks(make, change, when):
    """The posterior after two tasks of two steps, and what the state was like.

    :param when: the model changes.
    """
    model = convolutional()
    prior = DiagGaussian(weights(model), {n: p.abs() * 1e14 for n, p in weights(model).items()})
    if when == "at the start":
        change(model)
    # So large an ess that the noise, which differs with the layout, does not matter.
    optimizer = make(model.named_parameters(), ess=1e14, prior=prior)
    if when == "after a prior was given":
        change(model)
    for task in range(2):
        for step in range(2):
            sample(optimizer, model)
            optimizer.step()
            if when == "within a task" and task == step == 0:
                change(model)
        if when == "at the end of a task" and task == 0:
            change(model)
        optimizer.consolidate()
        if when == "between tasks" and task == 0:
            change(model)
        if when == "in another process" and task == 0:
            saved, old = optimizer.state_dict(), model
            model = convolutional()
            model.load_state_dict(old.state_dict())
            change(model)
            optimizer = make(model.named_parameters())
            optimizer.load_state_dict(saved)
    return optimizer.posterior()


@each_change
@pytest.mark.parametrize(
    "when",
    [
        "after a prior was given",
        "within a task",
        "at the end of a task",
        "between tasks",
        "in another process",
    ],
)
@pytest.mark.parametrize("make", EACH_OPTIMIZER.values(), ids=EACH_OPTIMIZER)
def test_state_follows_a_model_that_is_cast_or_laid_out_anew(make, when, change):
    q = two_tasks(make, change, when)
    kind = EACH_OPTIMIZER["vcl" if make is EACH_OPTIMIZER["vcl"] else "reference"]
    expected = two_tasks(kind, change, "at the start")
    for name in q.mean:
        assert q.mean[name].dtype == expected.mean[name].dtype
        torch.testing.assert_close(q.mean[name], expected.mean[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q.precision[name], expected.precision[name], rtol=1e-3, atol=0)


def test_a_model_that_is_cast_between_sample_and_step_is_refused():
    model = convolutional()
    optimizer = make_covon(model.named_parameters())
    sample(optimizer, model)
    model.double()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was cast or moved between its sample and"):
        optimizer.step()


def test_state_that_cannot_follow_is_refused(linear, batch):
    optimizer = make_covon(linear.named_parameters())
    train_step(optimizer, linear, batch)
    linear.weight.data = torch.zeros(5, 4)
    linear.bias.data = torch.zeros(5)
    with pytest.raises(
        ValueError, match=r"momentum of 'weight' must have .* shape \(5, 4\), got \(3, 4\)"
    ):
        train_step(optimizer, linear, batch)


@pytest.mark.parametrize("make", EACH_OPTIMIZER.values(), ids=EACH_OPTIMIZER)
def test_a_prediction_in_inference_mode_may_be_the_first_sample(make):
    model = convolutional()
    optimizer = make(model.parameters(), ess=100)
    sample(optimizer, model)
    optimizer.step()
    optimizer.consolidate()
    with torch.inference_mode(), optimizer.sampled_params(train=False):
        pass
    sample(optimizer, model)
    optimizer.step()


@pytest.mark.parametrize("make", EACH_OPTIMIZER.values(), ids=EACH_OPTIMIZER)
def test_the_default_device_of_new_tensors_does_not_matter(make):
    model = nn.Linear(600, 600)  # so large that its state is placed
    optimizer = make(model.parameters(), ess=100)
    x = torch.randn(4, 600)
    with torch.device("meta"):  # where nothing can be computed
        with optimizer.sampled_params():
            model(x).square().mean().backward()
        optimizer.step()
    assert {
        v.device.type for v in optimizer.state[model.weight].values() if torch.is_tensor(v)
    } == {"cpu"}


@pytest.mark.parametrize("make", EACH_OPTIMIZER.values(), ids=EACH_OPTIMIZER)
def test_a_state_is_not_loaded_into_a_sample(make):
    model = convolutional()
    optimizer = make(model.parameters(), ess=100)
    before = weights(model)
    with (
        pytest.raises(RuntimeError, match="must be called outside of sampled_params"),
        optimizer.sampled_params(),
    ):
        optimizer.load_state_dict(optimizer.state_dict())
    assert same(weights(model), before)


@pytest.mark.parametrize("implementation", ["compiled", "reference", "foreach"])
def test_gradients_may_have_other_strides_and_weights_may_have_gaps(implementation):
    """What lies between the entries is left alone."""
    wide = torch.randn(40, 6)
    runs = []
    for start in (wide[:, ::2].clone(), wide.clone()[:, ::2], wide[:, ::2].t().clone().t()):
        p = nn.Parameter(start)
        optimizer = make_covon([p], implementation=implementation, ess=1e14, hess_init=1.0)
        for step in range(4):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (p - 1).square().sum().backward()
            if step % 2:
                p.grad = p.grad.t().clone().t()
            optimizer.step()
        assert p.data_ptr() == start.data_ptr()
        runs.append(p.detach())
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other, rtol=1e-4, atol=1e-5)
    assert torch.equal(runs[1].as_strided((40, 3), (6, 2), 1), wide[:, 1::2])


@pytest.mark.parametrize("implementation", ["auto", "reference", "foreach"])
def test_tensors_without_memory_of_their_own(implementation):
    """As quantised weights are."""
    p = nn.Parameter(TwoTensor(torch.ones(5), torch.ones(5)))
    optimizer = make_covon([p], implementation=implementation)
    for _ in range(3):
        with optimizer.sampled_params():
            assert not torch.equal(p.a, torch.ones(5))
            optimizer.zero_grad()
            (p - 3).square().sum().backward()
        optimizer.step()
    assert (p.a > 1).all()


def test_match_layout():
    p = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 5)
    matched = match_layout(value, p, "w", "the sample")
    assert matched.stride() == p.stride()
    assert torch.equal(matched, value)
    assert match_layout(matched, p, "w", "the sample") is matched
    assert match_layout(value.double(), p, "w", "the sample").dtype == torch.float32
    with pytest.raises(ValueError, match=r"the sample of 'w' .* \(2, 3, 4, 5\), got \(3,\)"):
        match_layout(torch.empty(3), p, "w", "the sample")


def test_a_buffer_fits_until_the_parameter_is_laid_out_anew():
    p = nn.Parameter(torch.zeros(2, 3, 4, 5))
    buffer = SampleBuffer(p)
    assert buffer.fits(p)
    p.data = p.data.to(memory_format=torch.channels_last)
    assert not buffer.fits(p)
    assert not SampleBuffer(p).fits(nn.Parameter(torch.zeros(2, 3, 4, 5)))


def recorded(mc_samples, squared, grads, thetas):
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    record = SampleAccumulator(mc_samples, squared)
    for grad, theta in zip(grads, thetas, strict=True):
        assert not record.complete
        p.grad = grad.clone()
        record.add([(p, theta)])
    assert record.complete
    return p, record


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("mc_samples", [1, 3])
def test_averages_of_gradients_and_statistics_at_the_scale_of_the_gradient(mc_samples, squared):
    grads, thetas = torch.randn(mc_samples, 3), torch.randn(mc_samples, 3)
    p, record = recorded(mc_samples, squared, grads, thetas)
    torch.testing.assert_close(p.grad, grads.mean(0))
    want = (grads.square() if squared else grads * (thetas - p.detach())).mean(0)
    torch.testing.assert_close(record.statistic(p), want)
    p.grad.mul_(0.1)  # as clipping does
    torch.testing.assert_close(record.statistic(p), want * (0.01 if squared else 0.1))
    p.grad = p.grad * 5  # as a new tensor, too
    torch.testing.assert_close(record.statistic(p), want * (0.25 if squared else 0.5))
    p.grad.zero_()
    assert not record.statistic(p).any()


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_zero_gradients_are_no_division_by_zero(mc_samples):
    p, record = recorded(mc_samples, False, torch.zeros(mc_samples, 3), torch.ones(mc_samples, 3))
    assert not record.statistic(p).any()


def test_a_parameter_may_have_a_gradient_in_some_samples_only():
    """The average is over all of them."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    record = SampleAccumulator(2)
    p.grad = torch.ones(2)
    record.add([(p, torch.ones(2)), (q, torch.ones(2))])
    q.grad = torch.tensor([2.0, 4.0])
    record.add([(p, torch.ones(2)), (q, torch.full((2,), 3.0))])
    assert p.grad.tolist() == [0.5, 0.5]
    assert q.grad.tolist() == [1, 2]
    assert record.statistic(q).tolist() == [3, 6]
    assert record.covers(p)
    assert not record.covers(nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_gradients_that_nobody_cleared_are_noticed(mc_samples):
    p, record = recorded(mc_samples, True, torch.ones(mc_samples, 3), torch.ones(mc_samples, 3))
    assert record.still_in_grad()
    p.grad = None
    assert not record.still_in_grad()
