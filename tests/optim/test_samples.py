"""Posterior samples: their noise, memory layouts, and what they leave behind for a step."""

import copy
import sys

import numba
import pytest
import torch
from numba.core.caching import CacheImpl
from scipy import stats
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from toy_optimizers import (
    contents,
    make_covon,
    make_vcl,
    nll,
    record_sample,
    same,
    step_on,
    train_step,
    weights,
)

from covon_avalanche import DiagGaussian, optim
from covon_avalanche.optim import cpu_kernel, samples  # noqa: F401


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standard_normals_that_depend_on_key_and_number_alone(compiled, dtype, monkeypatch):
    def filled(key, number):
        out = torch.empty(3000, dtype=dtype)
        assert samples.fill_normal_(out, key, number) is out
        return out

    if not compiled:
        monkeypatch.setattr(samples, "compiled_kernel", lambda: None)
    pairs = [(key, number) for key in (5, 2**64 - 3) for number in (0, 1, 2**31)]
    torch.manual_seed(0)
    z = [filled(*pair) for pair in pairs]
    torch.manual_seed(1)
    assert torch.equal(z[-1], filled(*pairs[-1]))
    assert stats.kstest(torch.cat(z), "norm").pvalue > 1e-4
    for i, a in enumerate(z):
        for b in z[:i]:
            assert abs((a * b).mean()) < 5 / 3000**0.5


@pytest.mark.parametrize("trouble", ["not installed", "no folder", "switched off"])
def test_where_numba_does_not_work_torch_does(trouble, monkeypatch, recwarn):
    """No folder for its files: as in a container without a home."""
    if trouble == "not installed":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif trouble == "no folder":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(optim, "cpu_kernel", optim.cpu_kernel)  # put back afterwards
    monkeypatch.delitem(sys.modules, "covon_avalanche.optim.cpu_kernel")
    assert samples.compiled_kernel.__wrapped__() is None
    told = ["numba does not work here" in str(w.message) for w in recwarn]
    assert told == ([True] if trouble == "no folder" else [])


@pytest.mark.parametrize("how", ["shared memory", "a piece of a flattened model"])
def test_memory_that_others_see_is_written_to(make, how):
    """Other processes, or the flattened model, see the sample too, and the mean afterwards."""
    flat = torch.arange(20.0)
    p = nn.Parameter(flat.share_memory_() if how == "shared memory" else flat[4:16].view(3, 4))
    address, before = p.data_ptr(), flat.clone()
    optimizer = make([p])
    with optimizer.sampled_params():
        assert p.data_ptr() == address
        assert (flat != before).sum() == p.numel()
        p.square().sum().backward()
    assert torch.equal(flat, before)
    optimizer.step()
    assert p.data_ptr() == address
    assert not torch.equal(flat, before)


def test_a_sample_that_waits_for_its_step_survives_a_prediction(make, linear, batch):
    optimizer = make(linear.parameters())
    train_step(optimizer, linear, batch)
    model, undisturbed = copy.deepcopy((linear, optimizer))
    train_step(undisturbed, model, batch)
    record_sample(optimizer, nll(linear, batch))
    with optimizer.sampled_params(train=False):
        linear(batch[0])
    optimizer.step()
    assert same(contents(optimizer), contents(undisturbed))


CHANGES = {
    "double": lambda model: model.double(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))


def images(model):
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return x.to(model[0].weight.dtype), torch.arange(16) % 4


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("restarts", [False, True])
def test_state_follows_a_model_that_is_cast_or_laid_out_anew(make_each, change, restarts):
    """At any moment of the first of two tasks, or where a fresh optimizer loads the state."""
    # So large an ess that the noise, which differs with the layout, does not matter.
    options = dict(ess=1e14, lr=0.1, **(dict(inner="sgd") if make_each is make_vcl else {}))
    found = []
    for moment in ("at the start", *((3,) if restarts else (0, 1, 2, 3))):
        model = convolutional()
        start = weights(model)
        prior = DiagGaussian(start, {name: p.abs() * 1e14 for name, p in start.items()})
        if moment == "at the start":
            change(model)
        optimizer = make_each(model.named_parameters(), prior=prior, **options)
        for i, action in enumerate(["step", "step", "consolidate"] * 2):
            if i == moment:
                change(model)
                if restarts:
                    saved = optimizer.state_dict()
                    optimizer = make_each(model.named_parameters(), **options)
                    optimizer.load_state_dict(saved)
            if action == "step":
                train_step(optimizer, model, images(model))
            else:
                optimizer.consolidate()
        found.append(optimizer.posterior())
    for q in found[1:]:
        torch.testing.assert_close(dict(q.mean), dict(found[0].mean), rtol=1e-4, atol=1e-5)
        precision = dict(found[0].precision)
        torch.testing.assert_close(dict(q.precision), precision, rtol=1e-3, atol=0)


@pytest.mark.parametrize("start", [torch.float32, torch.float64])
def test_the_first_sample_after_a_change_has_the_right_variance(start):
    """The CPU kernel reads the state by its address."""
    found = []
    for implementation in ("foreach", "compiled"):
        model = convolutional().to(start)
        optimizer = make_covon(model.parameters(), implementation=implementation)
        train_step(optimizer, model, images(model))
        model[0].weight.data.zero_()  # which the optimizer cannot notice
        optimizer.state[model[0].weight]["hess"] *= torch.arange(1, 4).view(1, 3, 1, 1)
        model.to(torch.float32, memory_format=torch.channels_last)
        with optimizer.sampled_params():
            found.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes_between_sample_and_step_is_refused(change):
    model = convolutional()
    optimizer = make_covon(model.named_parameters())
    record_sample(optimizer, nll(model, images(model)))
    change(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was cast or moved between its sample and"):
        optimizer.step()


def test_state_that_cannot_follow_is_refused(linear, batch):
    optimizer = make_covon(linear.named_parameters())
    train_step(optimizer, linear, batch)
    linear.weight.data = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"momentum of 'weight' .* shape \(5, 4\), got \(3, 4\)"):
        optimizer.sampled_params().__enter__()


def test_a_prediction_in_inference_mode_may_be_the_first_sample(make_each, linear, batch):
    optimizer = make_each(linear.parameters())
    train_step(optimizer, linear, batch)
    optimizer.consolidate()
    with torch.inference_mode(), optimizer.sampled_params(train=False):
        pass
    train_step(optimizer, linear, batch)


def test_gradients_may_have_other_strides_and_weights_may_have_gaps(implementation):
    """What lies between the entries is left alone."""
    wide = torch.randn(40, 6)
    options = dict(hess_approx="gradsq", batch_size=1, ess=1e14)  # without visible noise
    runs = []
    for start in (wide[:, ::2].clone(), wide.clone()[:, ::2], wide[:, ::2].t().contiguous().t()):
        p = nn.Parameter(start)
        optimizer = make_covon([p], implementation=implementation, **options)
        for step in range(4):
            record_sample(optimizer, lambda: (p - 1).square().sum())  # noqa: B023
            if step % 2:
                p.grad = p.grad.t().contiguous().t()
            optimizer.step()
        assert p.data_ptr() == start.data_ptr()
        runs.append(p.detach())
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other, rtol=1e-4, atol=1e-5)
    assert torch.equal(runs[1].as_strided((40, 3), (6, 2), 1), wide[:, 1::2])


def test_tensors_without_memory_of_their_own(implementation):
    """As quantised weights are."""
    p = nn.Parameter(TwoTensor(torch.ones(5), torch.ones(5)))
    optimizer = make_covon([p], implementation=implementation)
    for _ in range(3):
        step_on(optimizer, lambda: (p - 3).square().sum())
    assert (p.a > 1).all()


def test_a_parameter_may_have_a_gradient_in_some_samples_only():
    """The average is over all of them, at the scale of the gradient in the step."""
    p, q, r = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    options = dict(hess_approx="gradsq", batch_size=1, betas=(0.9, 0.0), mc_samples=2)
    optimizer = make_covon([p, q, r], **options)
    for used in (p, q):
        with optimizer.sampled_params():
            (used @ torch.tensor([6.0, 12.0]) + 0.0 * r.sum()).backward()
    assert [x.grad.tolist() for x in (p, q, r)] == [[3, 6], [3, 6], [0, 0]]
    p.grad.mul_(0.1)  # as clipping does
    q.grad = q.grad * 0.1
    optimizer.step()
    estimate = 0.01 * torch.tensor([6.0, 12.0]) ** 2 / 2
    for parameter, hess in ((p, estimate), (q, estimate), (r, torch.zeros(2))):
        hess = hess + 0.5 * (hess - 0.5) ** 2 / (0.5 + 0.01)
        torch.testing.assert_close(optimizer.state[parameter]["hess"], hess)
