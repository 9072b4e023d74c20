"""What CoVON holds and what a step needs, measured at torch's allocator."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from toy_optimizers import step_on

from covon_avalanche.optim import CoVON, multi_tensor

WIDTH = 1200  # three layers of 1.4 million weights: several blocks each


def make(implementation):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    options = dict(ess=1e4, batch_size=32, implementation=implementation)
    optimizer = CoVON(model.named_parameters(), **options)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model, optimizer


def iteration(optimizer):
    gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
    with optimizer.sampled_params():
        for p, grad in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            p.grad = grad  # as a backward pass would leave it
    optimizer.step()


def allocated(work):
    """Bytes by which the allocations of ``work`` grew at their end, and at their peak."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events, stack = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    total = peak = 0
    for _, size in sorted(events, key=lambda e: e[0]):
        total += size
        peak = max(peak, total)
    return total, peak


@pytest.mark.parametrize(("implementation", "transient"), [("compiled", 0), ("foreach", 4)])
def test_what_is_held_and_what_a_step_needs_meanwhile(implementation, transient, monkeypatch):
    """In copies of the weights; the temporaries of multi-tensor operations, of one bucket."""
    monkeypatch.setattr(multi_tensor, "_LARGEST_PART_CPU", 2 * WIDTH**2)
    model, optimizer = make(implementation)
    weights = sum(p.numel() for p in model.parameters()) * 4
    layer = WIDTH**2 * 4
    small = 0.01 * weights  # tables, scalars, biases
    first = 2 * layer + small  # before a task's first step foreach draws

    held, peak = allocated(lambda: iteration(optimizer))  # first task: momentum, hess, sample
    assert abs(held - 3 * weights) < small
    assert peak < held + transient * layer + first
    for _ in range(3):  # later steps hold nothing more
        more, peak = allocated(lambda: iteration(optimizer))
        assert abs(more) < small
        assert peak < transient * layer + small

    freed, peak = allocated(optimizer.consolidate)  # two of the three become the prior
    assert abs(freed + weights) < small
    held, peak = allocated(lambda: iteration(optimizer))  # and three more with the next task
    assert abs(held - 3 * weights) < small
    assert peak < held + transient * layer + first


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_gradients_are_not_held_beyond_the_step(implementation, mc_samples):
    model = nn.Linear(400, 400)
    options = dict(mc_samples=mc_samples, implementation=implementation)
    optimizer = CoVON(model.parameters(), ess=10, batch_size=3, **options)
    for _ in range(2):
        step_on(optimizer, lambda: model(torch.randn(3, 400)).square().mean())
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert all(gradient() is None for gradient in gradients)


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
def test_an_optimizer_that_nobody_holds_is_freed_at_once(hess_approx):
    """Without the collector of reference cycles, as torch's optimizers are."""

    def train():
        model = nn.Linear(4, 4)
        options = dict(ess=10, batch_size=3, hess_approx=hess_approx)
        optimizer = CoVON(model.parameters(), **options)
        step_on(optimizer, lambda: model(torch.randn(3, 4)).square().mean())
        optimizer.consolidate()
        return weakref.ref(optimizer), weakref.ref(model.weight)

    gc.disable()
    try:
        assert [reference() for reference in train()] == [None, None]
    finally:
        gc.enable()
