"""Checks: rules and errors, and the check of gradients that does not wait for the device."""

import math

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon

from covon_avalanche.optim import checks
from covon_avalanche.optim.checks import DeferredCheck


@pytest.mark.parametrize(
    ("value", "zero", "good"),
    [
        (1.0, False, True),
        (3.4e38, False, True),
        (3.5e38, False, False),
        (0, False, False),
        (0, True, True),
        (-1e-9, True, False),
        (math.nan, True, False),
        (math.inf, False, False),
    ],
)
def test_positive_and_within_float32(value, zero, good):
    if good:
        checks.check_positive("x", value, zero=zero)
        return
    with pytest.raises(ValueError, match=rf"x must be (at most|{'>=' if zero else '>'} 0) .*got"):
        checks.check_positive("x", value, zero=zero)


def test_averaging_coefficients():
    checks.check_betas([0.0, 0.999])
    checks.check_betas((0.9, None), second_may_be_none=True)
    for bad in ((0.9, 1.0), (0.9,), (None, 0.9), 0.9, (0.9, math.nan), (-0.1, 0.5), ("0", 0)):
        for none in (False, True):
            with pytest.raises(ValueError, match="betas must be two numbers"):
                checks.check_betas(bad, second_may_be_none=none)
    with pytest.raises(ValueError, match="betas must be two numbers"):
        checks.check_betas((0.9, None))


def test_the_largest_gradient_keeps_the_estimate_within_bounds():
    assert checks.largest_gradient(False, 1e9) == 1e9
    assert checks.largest_gradient(True, 1e-9) == 1e9
    assert 1e5 * checks.largest_gradient(True, 1e5) ** 2 == pytest.approx(1e15)


class Event:
    """Of a device that has not finished until told so."""

    done = False
    waited = 0

    def __init__(self, device):
        pass

    def record(self):
        pass

    def query(self):
        return Event.done

    def synchronize(self):
        Event.waited += 1


@pytest.fixture
def event(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "done", False)
    monkeypatch.setattr(Event, "waited", 0)
    return Event


class TestDeferredCheck:
    def check(self, *bad):
        """Four steps with two parameters each; the second's gradient is bad in some."""
        deferred = DeferredCheck()
        for step in range(1, 5):
            grads = [torch.ones(3), torch.full((2, 2), 10.0)]
            if step in bad:
                grads[1][1, 0] = math.nan if step % 2 else 1e10
            finite = deferred.add([("a", grads[0], 1e9), ("b", grads[1], 1e9)], step)
            assert finite.item() == (step not in bad)
        return deferred

    def test_nothing_is_said_until_the_device_has_finished(self, event):
        deferred = self.check(2)
        deferred.raise_if_bad(wait=False)
        assert event.waited == 0
        event.done = True
        with pytest.raises(FloatingPointError, match=r"gradient of 'b' is not .* in step 2 of"):
            deferred.raise_if_bad(wait=False)
        deferred.raise_if_bad(wait=False)  # said once

    def test_waiting_raises_the_first(self, event):
        deferred = self.check(3, 4)
        with pytest.raises(FloatingPointError, match=r"'b' .* in step 3"):
            deferred.raise_if_bad(wait=True)
        assert event.waited == 3
        deferred.raise_if_bad(wait=True)  # steps after it are forgotten
        assert event.waited == 3

    def test_good_steps_are_forgotten(self, event):
        deferred = self.check()
        event.done = True
        deferred.raise_if_bad(wait=False)
        event.done = False
        deferred.raise_if_bad(wait=True)
        assert event.waited == 0


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize("when", ["later step", "consolidate", "state_dict"])
def test_on_an_accelerator_a_bad_step_is_skipped_and_told_later(event, when, hess_approx):
    def state():
        entries = optimizer.state[p]
        return [t.clone() for t in (p.detach(), entries["momentum"], entries["hess"])]

    def step(scale=1.0):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            (scale * (p - 3).square()).sum().backward()
        optimizer.step()

    p = Elsewhere(torch.ones(5))
    optimizer = make_covon(
        [("w", p)], hess_approx=hess_approx, batch_size=4, implementation="foreach"
    )
    step()
    event.done = True
    step()
    before = state()
    event.done = False
    step(math.inf)
    assert all(map(torch.equal, state(), before))
    step()
    assert not any(map(torch.equal, state(), before))
    after = state()
    event.done = when == "later step"
    says = (
        "gradient of 'w' is not finite or too large in step 3 of this task; that step was skipped"
    )
    with pytest.raises(FloatingPointError, match=says):
        {"later step": step, "consolidate": optimizer.consolidate}.get(when, optimizer.state_dict)()
    assert all(map(torch.equal, state(), after))
    event.done = True
    step()  # training continues
    optimizer.consolidate()
