"""CoVON and VCL in Lightning's loop do what they do in a plain one, bit by bit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy_optimizers import make_covon, make_vcl, same, weights

lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

from covon_avalanche.integrations.lightning import PosteriorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(48, 4), torch.randint(3, (48,)))


class Module(lightning.LightningModule):
    def __init__(self, net, make):
        super().__init__()
        self.net, self.make = net, make
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(self.net.weight.detach().clone())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.validated = weights(self.net)

    def configure_optimizers(self):
        generator = torch.Generator().manual_seed(3)
        return self.make(self.net.named_parameters(), generator=generator)


def fit(module, epochs=2, callbacks=(), ckpt_path=None, **options):
    loader = DataLoader(DATA, 8)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu",
        enable_checkpointing=False, **quiet, **options,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(DATA, 48), ckpt_path=ckpt_path)
    return trainer


def plain(net, make, accumulate, epochs=2, clip=None):
    optimizer = make(net.named_parameters(), generator=torch.Generator().manual_seed(3))
    for _ in range(epochs):
        batches = list(DataLoader(DATA, 8))
        for i in range(0, len(batches), accumulate):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                for x, y in batches[i : i + accumulate]:
                    (nn.functional.cross_entropy(net(x), y) / accumulate).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_and_clipping_equal_a_plain_loop(make, accumulate, clip, linear):
    net = copy.deepcopy(linear)
    optimizer = plain(net, make, accumulate, clip=clip)
    before, posterior = weights(net), optimizer.posterior()
    optimizer.consolidate()
    module = Module(copy.deepcopy(linear), make)
    trainer = fit(
        module, callbacks=[PosteriorCallback()], accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )  # fmt: skip
    assert same(module.validated, before)  # the mean
    assert same(weights(module.net), weights(net))  # merged
    merged = trainer.optimizers[0].posterior(module.net.named_parameters())
    expected = optimizer.posterior()
    assert same(merged.precision, expected.precision)
    assert not same(expected.mean, posterior.mean) or make is make_vcl
    assert len({w.sum().item() for w in module.seen}) == 12 // accumulate  # a sample each step


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_without_accumulation_step_samples_by_itself(make, linear):
    net = copy.deepcopy(linear)
    plain(net, make, 1)
    module = Module(copy.deepcopy(linear), make)
    fit(module)
    assert same(weights(module.net), weights(net))


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_accumulation_without_the_callback_is_an_error(make, linear):
    with pytest.raises(RuntimeError, match=r"outside of a sample before step\(closure\).*Callback"):
        fit(Module(linear, make), accumulate_grad_batches=2)


def test_a_resumed_fit_equals_one_that_nobody_stopped(linear, tmp_path):
    whole = Module(copy.deepcopy(linear), make_covon)
    fit(whole, epochs=4, callbacks=[PosteriorCallback()], accumulate_grad_batches=2)
    first = Module(copy.deepcopy(linear), make_covon)
    trainer = fit(
        first, 2, callbacks=[PosteriorCallback(consolidate=False)], accumulate_grad_batches=2
    )
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = Module(copy.deepcopy(linear), make_covon)
    fit(
        second, 4, callbacks=[PosteriorCallback()], accumulate_grad_batches=2,
        ckpt_path=tmp_path / "half.ckpt",
    )  # fmt: skip
    assert same(weights(second.net), weights(whole.net))


def test_a_compiled_module_equals_a_plain_one(linear):
    plain_module, module = Module(copy.deepcopy(linear), make_covon), Module(linear, make_covon)
    fit(plain_module, callbacks=[PosteriorCallback()])
    fit(torch.compile(module, backend="aot_eager"), callbacks=[PosteriorCallback()])
    torch.testing.assert_close(weights(linear), weights(plain_module.net))


@pytest.mark.parametrize("callbacks", [[], [PosteriorCallback()]])
def test_bfloat16_is_autocast_with_float32_weights(callbacks, linear):
    dtypes = set()
    linear.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    module = Module(linear, make_covon)
    before = weights(linear)
    fit(module, epochs=1, precision="bf16-mixed", callbacks=callbacks)
    assert dtypes == {torch.bfloat16}
    assert linear.weight.dtype == torch.float32
    assert not same(weights(linear), before)


def test_what_cannot_work_is_one_sentence(linear):
    def adam(params, generator):
        return torch.optim.Adam([p for _, p in params])

    for make, sentence in (
        (adam, "needs one CoVON or BayesByBackprop, got Adam"),
        (lambda p, generator: make_covon(p, mc_samples=2), "got mc_samples = 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit(Module(linear, make), callbacks=[PosteriorCallback()])
    sentence = "must be a multiple of accumulate_grad_batches = 2"
    with pytest.raises(ValueError, match=sentence):
        options = dict(accumulate_grad_batches=2, val_check_interval=3)
        fit(Module(linear, make_covon), callbacks=[PosteriorCallback()], **options)


def test_an_exception_in_a_batch_leaves_the_mean(linear):
    module = Module(linear, make_covon)
    seen = []

    def fail(batch, batch_idx):
        seen.append(weights(linear))
        raise KeyError("no batch")

    before = weights(linear)
    module.training_step = fail
    with pytest.raises(KeyError):
        fit(module, callbacks=[PosteriorCallback()])
    assert not same(seen[0], before)
    assert same(weights(linear), before)
