"""The ways to run CoVON's step, against Algorithm 1 as pure functions and each other."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from jobs import SIZES, largest_error, make_jobs, same_as_drawn_anew
from torch.testing._internal.two_tensor import TwoTensor
from toys import given_noise, make_covon, train_step, weights

from covon_avalanche.optim import CoVON
from covon_avalanche.optim.kernels import KernelsByDevice, compiled, foreach
from covon_avalanche.optim.kernels.eager import EagerPlan

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13}
EACH = pytest.mark.parametrize("implementation", ["eager", "foreach", "compiled"])
each_kind = pytest.mark.parametrize(
    ("dtype", "prior", "holds"),
    [
        (torch.float32, "tensors", "theta"),
        (torch.float32, "numbers", "theta"),
        (torch.float32, "centre", "theta"),
        (torch.float32, "tensors", "product"),
        (torch.float32, "numbers", "hess"),
        (torch.float64, "tensors", "hess"),
        (torch.float32, "tensors", "nothing"),
        (torch.float64, "numbers", "nothing"),
        (torch.float64, "tensors", "theta"),
    ],
)


@each_kind
@EACH
def test_a_step_is_algorithm_1(implementation, dtype, prior, holds):
    """Small, odd and large tensors in one call; sizes around the kernels' own blocks."""
    jobs = make_jobs(dtype, prior, holds=holds)
    ((kernel, same),) = KernelsByDevice(implementation).split(jobs)
    assert same == jobs
    assert kernel.safe(jobs)
    error = largest_error(jobs, lambda: kernel.step(jobs, 5))
    assert error < TOLERANCE[dtype]


@EACH
@pytest.mark.parametrize("prior", ["tensors", "numbers"])
@pytest.mark.parametrize("size", [300, 2**17 + 3])
def test_jobs_keep_their_own_settings_whatever_they_were_before(implementation, prior, size):
    """As groups do that differ from the start, from some step on, or no more."""
    jobs = make_jobs(torch.float64, prior, sizes=(size,) * 3)
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    normal = torch.Generator().manual_seed(1)

    def step():
        assert kernel.safe(jobs)
        kernel.step(jobs, None)

    for lr in ((0.1, 0.1, 0.1), (0.1, 0.0, 0.3), (0.1, 0.0, 0.0), (0.2, 0.2, 0.2)):
        for i, job in enumerate(jobs):
            job.lr, job.beta1, job.beta2 = lr[i], 0.9 - lr[i], 0.99 - lr[i] / 10
            job.clip_radius, job.correction = 0.5 + lr[i], 1 + lr[i]
            job.grad = torch.randn(size, dtype=torch.float64, generator=normal)
            job.sample.normal_(generator=normal)
        assert largest_error(jobs, step) < 1e-13


@EACH
def test_jobs_whose_state_is_a_number_keep_their_own(implementation):
    jobs = make_jobs(torch.float64, "numbers", sizes=(20_000,) * 3)
    for i, job in enumerate(jobs):
        job.prior_precision, job.hess, job.prior_mean = 10.0**i, 0.1 * 4**i, float(i)
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    assert kernel.draw(jobs, 0) == []
    for job in jobs:
        spread = ((job.sample - job.mean) ** 2).mean() * (job.ess * job.hess + job.prior_precision)
        assert abs(spread - 1) < 5 * (2 / 20_000) ** 0.5
    for job in jobs:
        job.hess = torch.full_like(job.mean, job.hess)
    ((kernel, _),) = KernelsByDevice(implementation).split(list(jobs))
    assert kernel.safe(jobs)
    assert largest_error(jobs, lambda: kernel.step(jobs, None)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("plan", [compiled.CompiledPlan, EagerPlan, foreach.ForeachPlan])
def test_the_sample_drawn_with_a_step_is_the_one_drawn_alone(plan, dtype):
    jobs = make_jobs(dtype, "tensors")
    assert same_as_drawn_anew(plan(jobs), jobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EACH
def test_all_draw_the_same_noise(implementation, dtype):
    """That of the compiled kernel, wherever the blocks end and whatever the order."""
    one, other = make_jobs(dtype, "tensors"), make_jobs(dtype, "tensors")[::-1]
    ((kernel, _),) = KernelsByDevice(implementation).split(other)
    assert compiled.CompiledPlan(one).draw(2**62 + 9) == kernel.draw(other, 2**62 + 9) == []
    for a, b in zip(one, reversed(other), strict=True):
        torch.testing.assert_close(a.sample, b.sample)


@pytest.mark.parametrize("implementation", ["eager", "foreach"])
@pytest.mark.parametrize("changes", [{}, {"mc_samples": 2}, {"hess_approx": "gradsq"}])
def test_a_seed_gives_the_same_run_by_each(linear, batch, implementation, changes):
    x, y = batch

    def run(implementation):
        model = copy.deepcopy(linear).double()
        optimizer = make_covon(
            model.parameters(), implementation=implementation, batch_size=16, **changes
        )
        for step in range(20):
            train_step(optimizer, model, (x.double(), y))
            if step == 9:
                optimizer.consolidate()
        return weights(model)

    for one, other in zip(run(implementation).values(), run("compiled").values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_small_bundles_draw_the_same_noise():
    one, other = make_jobs(torch.float32, "tensors"), make_jobs(torch.float32, "tensors")
    assert compiled.CompiledPlan(one).draw(8) == foreach.ForeachPlan(other, 100).draw(8) == []
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.sample, b.sample)


@EACH
def test_nothing_is_drawn_twice(implementation):
    """Only what a step has not drawn already, such as the heads of other tasks."""
    jobs = make_jobs(torch.float64, "tensors")
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    assert kernel.draw(jobs, 3) == []
    some = jobs[:3]
    assert kernel.safe(some)
    kernel.step(some, 4)
    for job in jobs[:3]:
        job.sample.fill_(7.0)
    others = [job.sample.clone() for job in jobs[3:]]
    assert kernel.draw(jobs, 4) == []
    assert all((job.sample == 7).all() for job in jobs[:3])
    assert not any((job.sample == other).any() for job, other in zip(jobs[3:], others, strict=True))
    assert kernel.draw(jobs, 4) == []  # what was drawn ahead counts once
    assert not any((job.sample == 7).any() for job in jobs)


@EACH
def test_drawing_ahead_never_shows_whatever_the_weights_are_like(implementation):
    """Groups with their own settings, more than a block, other layouts, other types, and one that
    has a gradient in some steps only."""

    def run(forget):
        torch.manual_seed(0)
        gaps = torch.randn(4, 6)[:, ::2]
        last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        first = [torch.randn(2**17 + 9), gaps, torch.randn(5, dtype=torch.float64)]
        weights = [torch.nn.Parameter(w) for w in (*first, last, torch.randn(()))]
        groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.02, "ess": 30.0}]
        generator = torch.Generator().manual_seed(1)
        optimizer = CoVON(
            groups, ess=50, batch_size=4, implementation=implementation, generator=generator
        )
        for step in range(7):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                used = weights[: 4 if step == 3 else 5]
                sum((w - 1).square().sum() for w in used).backward()
            optimizer.step()
            if forget:
                optimizer._forget_plans()
            if step == 4:
                optimizer.consolidate()
        return weights

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize("layout", ["channels_last", "gaps", "flattened"])
def test_the_layout_of_a_parameter_changes_nothing(layout):
    """Dense in another order, a view with gaps, and a piece of a flattened model."""
    values = torch.randn(4, 3, 5, 5)
    if layout == "channels_last":
        other = values.to(memory_format=torch.channels_last)
    elif layout == "gaps":
        other = torch.zeros(4, 3, 5, 10)[..., ::2].copy_(values)
    else:
        other = torch.zeros(values.numel() + 7)[7:].view_as(values).copy_(values)
    runs = []
    for start in (values.clone(), other):
        p = torch.nn.Parameter(start)
        noise = torch.randn(6, *values.shape, generator=torch.Generator().manual_seed(1))
        optimizer = CoVON([p], ess=50, implementation="eager")
        with given_noise(noise):
            for step in range(6):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    (p - 1).square().sum().backward()
                optimizer.step()
                if step == 2:
                    optimizer.consolidate()
        assert p.data_ptr() == start.data_ptr()
        runs.append(p.detach())
    torch.testing.assert_close(runs[0], runs[1])


@EACH
def test_what_lies_between_the_entries_is_left_alone(implementation):
    wide = torch.randn(40, 6)
    runs = []
    for start in (wide[:, ::2].clone(), wide.clone()[:, ::2]):
        p = torch.nn.Parameter(start)
        optimizer = make_covon([p], implementation=implementation)
        for _ in range(4):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (p - 1).square().sum().backward()
            optimizer.step()
        runs.append(p.detach())
    torch.testing.assert_close(*runs)
    between = runs[1].as_strided((40, 3), (6, 2), 1)
    assert torch.equal(between, wide[:, 1::2])


@pytest.mark.parametrize("implementation", ["auto", "eager", "foreach"])
def test_tensors_without_memory_of_their_own(implementation):
    """As quantised weights are."""
    p = torch.nn.Parameter(TwoTensor(torch.ones(5), torch.ones(5)))
    optimizer = make_covon([p], implementation=implementation)
    for _ in range(3):
        with optimizer.sampled_params():
            assert not torch.equal(p.a, torch.ones(5))
            optimizer.zero_grad()
            (p - 3).square().sum().backward()
        optimizer.step()
    assert (p.a > 1).all()


def test_the_number_of_threads_changes_nothing():
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            jobs = make_jobs(torch.float32, "tensors", sizes=(compiled._ONE_THREAD + 77, 300))
            plan = compiled.CompiledPlan(jobs)
            assert plan.draw(11) == []
            assert plan.safe()
            plan.step(12)
            results.append([torch.cat([j.mean, j.hess, j.momentum, j.sample]) for j in jobs])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EACH
@pytest.mark.parametrize("place", [0, -1])
def test_precisions_that_are_not_positive_are_named(implementation, place):
    jobs = make_jobs(torch.float64, "numbers")
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    jobs[2].hess[place] = jobs[-1].hess[place] = -1.0
    assert [job.name for job in kernel.draw(jobs, 0)] == [jobs[2].name, jobs[-1].name]


@EACH
def test_gradients_whose_square_would_overflow_are_not_safe(implementation):
    jobs = make_jobs(torch.float32, "tensors", holds="nothing")
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    for job in jobs:
        job.batch_size = 1e3
    jobs[3].grad[1] = 2e5
    assert kernel.safe(jobs)
    for unsafe in (2e6, -2e6, math.inf, math.nan):
        jobs[3].grad[1] = unsafe
        assert not kernel.safe(jobs)


@EACH
def test_a_backward_pass_through_weights_that_a_step_has_changed_is_an_error(
    linear, implementation
):
    optimizer = make_covon(linear.parameters(), implementation=implementation)
    with optimizer.sampled_params():
        linear(torch.ones(2, 4)).square().sum().backward()
    loss = linear(torch.ones(2, 4, requires_grad=True)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("implementation", ["eager", "foreach"])
def test_an_error_within_a_step_leaves_the_next_one_alone(implementation):
    jobs = make_jobs(torch.float64, "tensors")
    ((kernel, _),) = KernelsByDevice(implementation).split(jobs)
    assert kernel.draw(jobs, 1) == []
    assert kernel.safe(jobs)
    noise = mock.patch("covon_avalanche.optim.noise.fill_normal", side_effect=MemoryError)
    with noise, pytest.raises(MemoryError):
        kernel.step(jobs, 2)
    for job in jobs:
        job.sample.fill_(7.0)
    assert kernel.draw(jobs, 2) == []
    assert not any((job.sample == 7).any() for job in jobs)
    assert kernel.safe(jobs)
    assert largest_error(jobs, lambda: kernel.step(jobs, 3)) < 1e-13


@EACH
def test_drawing_ahead_never_shows(linear, batch, implementation):
    """Whatever happens between two steps, the run is the one that draws anew each time."""

    def run(between):
        model = torch.nn.Linear(4, 3)
        model.load_state_dict(start)
        optimizer = make_covon(model.parameters(), implementation=implementation)
        for step in range(6):
            train_step(optimizer, model, batch)
            between(step, optimizer, model)
        return weights(model)

    def nothing(step, optimizer, model):
        pass

    def forget(step, optimizer, model):
        optimizer._forget_plans()

    def change_ess(step, optimizer, model):
        optimizer.param_groups[0]["ess"] = 100.0 + step

    def change_ess_and_forget(step, optimizer, model):
        change_ess(step, optimizer, model)
        optimizer._forget_plans()

    def change_decay(step, optimizer, model):
        optimizer.param_groups[0]["weight_decay"] = 0.1 + step

    def change_decay_and_forget(step, optimizer, model):
        change_decay(step, optimizer, model)
        optimizer._forget_plans()

    def merge_and_change_ess(step, optimizer, model):
        if step == 2:
            optimizer.consolidate()
        change_ess(step, optimizer, model)

    def merge_change_ess_and_forget(step, optimizer, model):
        merge_and_change_ess(step, optimizer, model)
        optimizer._forget_plans()

    def move_weights(step, optimizer, model):
        with torch.no_grad():
            model.weight.add_(0.1)

    def move_weights_and_forget(step, optimizer, model):
        move_weights(step, optimizer, model)
        optimizer._forget_plans()

    def reload(step, optimizer, model):
        optimizer.load_state_dict(optimizer.state_dict())

    def predict(step, optimizer, model):
        state = optimizer.generator.get_state()
        with optimizer.sampled_params(train=False):
            pass
        optimizer.generator.set_state(state)

    def reseed(step, optimizer, model):
        optimizer.generator.manual_seed(100 + step)

    def reseed_and_forget(step, optimizer, model):
        reseed(step, optimizer, model)
        optimizer._forget_plans()

    def share(step, optimizer, model):
        torch.randn(3, generator=optimizer.generator)

    def share_and_forget(step, optimizer, model):
        share(step, optimizer, model)
        optimizer._forget_plans()

    start = linear.state_dict()
    for one, other in (
        (reseed, reseed_and_forget),
        (share, share_and_forget),
        (nothing, forget),
        (change_ess, change_ess_and_forget),
        (change_decay, change_decay_and_forget),
        (merge_and_change_ess, merge_change_ess_and_forget),
        (move_weights, move_weights_and_forget),
        (nothing, reload),
        (nothing, predict),
    ):
        a, b = run(one), run(other)
        assert all(torch.equal(a[n], b[n]) for n in a), other.__name__


def test_implementations_say_where_they_work(linear):
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'fastest'"):
        CoVON(linear.parameters(), ess=10, implementation="fastest")
    optimizer = CoVON(linear.parameters(), ess=10, implementation="triton")
    with pytest.raises(ValueError, match="'triton' is for parameters on cuda, got cpu"):
        optimizer.sampled_params().__enter__()


def test_a_bundle_never_exceeds_its_block():
    jobs = make_jobs(torch.float32, "tensors")
    plan = foreach.ForeachPlan(jobs, 100)
    entries = [sum(part.numel() for part in bundle.mean) for bundle in plan.bundles()]
    assert max(entries) <= 100
    assert sum(entries) == sum(SIZES)


def test_the_gpu_kernel_in_tritons_interpreter():
    """On a machine without a GPU: arithmetic and indexing, not speed. In another process,
    because Triton decides when it is imported."""
    pytest.importorskip("triton", reason="this torch came without Triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("triton_interpreted.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == 8


STEPS = """
import torch
from covon_avalanche.optim import CoVON

for dtype in (torch.float32, torch.float64):
    layer = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = CoVON(layer.parameters(), ess=10.0, implementation="compiled")
    for _ in range(2):
        with optimizer.sampled_params():
            layer(torch.ones(4, 3, dtype=dtype)).sum().backward()
        optimizer.step()
"""


def test_what_is_compiled_once_is_not_compiled_again_by_another_process(tmp_path):
    """It would cost each process seconds, and more files each time. No two kernels share an index
    of numba's, in which processes that write at the same time would mix them up."""
    found = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STEPS],
            check=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        )
        found.append(sorted(tmp_path.rglob("*.nbc")))
    assert found[0] == found[1]
    alone = [file for file in found[0] if file.name.startswith("compiled.")]
    assert len(alone) >= 6  # checks, samples and steps of both dtypes
    assert all(file.name.endswith(".1.nbc") for file in alone)  # one entry an index
