"""CoVON and VCL in a loop of Accelerate do what they do in a plain one."""

import copy

import pytest
import torch
from toy_optimizers import accumulate, make_covon, make_vcl, nll, same, weights

from covon_avalanche.merging import RegMean, merge_into
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments

accelerate = pytest.importorskip("accelerate", reason="needs the extra language")
pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = list(zip(torch.randn(6, 8, 4), torch.randint(3, (6, 8)), strict=True))


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test begins without the process-wide state that a Trainer of another test leaves."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(net, make, accelerator):
    """Steps of two micro-batches, clipped, with a schedule; the posterior after them."""
    optimizer = make(net.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, wrapped, schedule = accelerator.prepare(net, optimizer, scheduler)
    for pair in zip(BATCHES[::2], BATCHES[1::2], strict=True):
        with optimizer.sampled_params():
            wrapped.zero_grad()
            for batch in pair:
                accelerator.backward(nll(model, batch)() / 2)
        accelerator.clip_grad_norm_(net.parameters(), 0.05)
        wrapped.step()
        schedule.step()
    return optimizer.posterior()


def train_plainly(net, make, half=False):
    optimizer = make(net.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i in (0, 2, 4):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            accumulate(optimizer, net, BATCHES[i : i + 2], size=2, clip=0.05)
        scheduler.step()
    return optimizer.posterior()


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accumulation_clipping_schedule_and_autocast_equal_a_plain_loop(make, precision, linear):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    found = train(copy.deepcopy(linear), make, accelerator)
    expected = train_plainly(linear, make, half=precision == "bf16")
    assert same(found.mean, expected.mean)
    assert same(found.precision, expected.precision)


def test_attaching_the_prepared_model_fits_a_loop_with_accumulate(linear):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = copy.deepcopy(linear)
    optimizer = make_covon(net.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, wrapped, schedule = accelerator.prepare(net, optimizer, scheduler)
    optimizer.attach(model)
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(nll(model, batch)())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
    expected = train_plainly(linear, make_covon)
    assert same(optimizer.posterior().mean, expected.mean)
    assert same(optimizer.posterior().precision, expected.precision)


def test_a_compiled_model_equals_a_plain_one(linear):
    plugin = accelerate.utils.TorchDynamoPlugin(backend="eager")
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    found = train(copy.deepcopy(linear), make_covon, accelerator)
    torch.testing.assert_close(dict(found.mean), dict(train_plainly(linear, make_covon).mean))


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_a_saved_state_resumes_bit_for_bit(make, linear, tmp_path):
    def prepared():
        net, accelerator = copy.deepcopy(linear), accelerate.Accelerator(cpu=True)
        return accelerator, net, *accelerator.prepare(net, make(net.named_parameters()))

    def train(net, model, optimizer, batches):
        for batch in batches:
            with optimizer.optimizer.sampled_params():
                optimizer.zero_grad()
                nll(model, batch)().backward()
            optimizer.step()
        return weights(net)

    accelerator, *whole = prepared()
    train(*whole, BATCHES[:3])
    accelerator.save_state(tmp_path / "half")
    expected = train(*whole, BATCHES[3:])
    accelerator, *resumed = prepared()
    accelerator.load_state(tmp_path / "half")
    assert same(train(*resumed, BATCHES[3:]), expected)


def anchored(net, prepared):
    """Weights after two tasks of Ada-Reg, in a loop of Accelerate or a plain one."""
    model, optimizer = net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if prepared:
        model, optimizer = accelerator.prepare(net, optimizer)
    anchor = QuadraticAnchor(net.named_parameters(), ess=8, strength=1e3)
    for task in (BATCHES[:2], BATCHES[2:]):
        with anchor.pulling(optimizer):
            for i, batch in enumerate(task):
                if prepared:
                    with accelerator.accumulate(model):
                        accelerator.backward(nll(model, batch)())
                        optimizer.step()
                        optimizer.zero_grad()
                else:
                    (nll(model, batch)() / 2).backward()
                    if i % 2:
                        optimizer.step()
                        optimizer.zero_grad()
        anchor.add(adam_second_moments(net.named_parameters(), optimizer))
    return weights(net)


def test_an_anchor_pulls_in_the_steps_of_a_prepared_optimizer(linear):
    expected = anchored(copy.deepcopy(linear), prepared=False)
    assert same(anchored(linear, prepared=True), expected)


def merged(net, prepared):
    """The posterior after a task that RegMean merges."""
    optimizer = make_covon(net.named_parameters())
    before = weights(net)
    accumulate(optimizer, net, BATCHES[:2], size=2, clip=1.0)
    given = accelerate.Accelerator(cpu=True).prepare(optimizer) if prepared else optimizer
    merge_into(net, given, RegMean(), before=before, batches=lambda: BATCHES[:2])
    return optimizer.posterior()


def test_a_prepared_optimizer_is_merged_with_its_posterior(linear):
    expected = merged(copy.deepcopy(linear), prepared=False)
    found = merged(linear, prepared=True)
    assert same(found.mean, expected.mean)
    assert same(found.precision, expected.precision)
