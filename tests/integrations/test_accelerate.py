"""CoVON and VCL in a loop of Accelerate do what they do in a plain one."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon, make_vcl, same, weights

accelerate = pytest.importorskip("accelerate", reason="needs the extra language")
pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = list(zip(torch.randn(6, 8, 4), torch.randint(3, (6, 8)), strict=True))


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test begins without the process-wide state that a Trainer of another test leaves."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def make_optimizer(make, net):
    return make(net.named_parameters(), generator=torch.Generator().manual_seed(3))


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loop(net, optimizer, scheduler, accelerator=None, batches=BATCHES, precise=True):
    """Steps of two micro-batches, clipped, with a schedule."""
    prepared = net
    bare = optimizer
    if accelerator is not None:
        prepared, optimizer, scheduler = accelerator.prepare(net, bare, scheduler)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        with bare.sampled_params():
            optimizer.zero_grad()
            for x, y in pair:
                half = torch.autocast("cpu", torch.bfloat16)
                with nullcontext() if precise or accelerator is not None else half:
                    loss = nn.functional.cross_entropy(prepared(x).float(), y) / 2
                accelerator.backward(loss) if accelerator is not None else loss.backward()
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        clip(net.parameters(), 0.05)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accumulation_clipping_schedule_and_autocast_equal_a_plain_loop(make, precision, linear):
    found = []
    for accelerator in (None, accelerate.Accelerator(cpu=True, mixed_precision=precision)):
        net = copy.deepcopy(linear)
        optimizer = make_optimizer(make, net)
        loop(net, optimizer, schedule(optimizer), accelerator, precise=precision == "no")
        optimizer.consolidate()
        found.append((weights(net), optimizer.posterior(net.named_parameters())))
    (plain, expected), (accelerated, posterior) = found
    assert same(plain, accelerated)
    assert same(expected.precision, posterior.precision)
    assert not same(plain, weights(linear))


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_a_saved_state_resumes_bit_for_bit(make, linear, tmp_path):
    def prepared():
        net = copy.deepcopy(linear)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, make_optimizer(make, net))
        return accelerator, net, model, optimizer

    def train(net, model, optimizer, batches):
        for x, y in batches:
            with optimizer.optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return weights(net)

    accelerator, *whole = prepared()
    train(*whole, BATCHES[:3])
    accelerator.save_state(tmp_path / "half")
    expected = train(*whole, BATCHES[3:])
    accelerator, *resumed = prepared()
    accelerator.load_state(tmp_path / "half")
    assert same(train(*resumed, BATCHES[3:]), expected)


def test_a_compiled_model_equals_a_plain_one(linear):
    expected = copy.deepcopy(linear)
    optimizer = make_optimizer(make_covon, expected)
    loop(expected, optimizer, schedule(optimizer))
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aot_eager")
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    net = copy.deepcopy(linear)
    optimizer = make_optimizer(make_covon, net)
    loop(net, optimizer, schedule(optimizer), accelerator)
    torch.testing.assert_close(weights(net), weights(expected))
