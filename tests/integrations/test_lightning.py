"""CoVON and VCL in Lightning's loop do what they do in a plain one, bit by bit."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from toy_optimizers import accumulate, make_covon, make_vcl, nll, same, weights

lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")
lightning_fabric = pytest.importorskip("lightning.fabric", reason="needs the extra lightning")

from covon_avalanche.integrations.lightning import PosteriorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(48, 4), torch.randint(3, (48,)))


class Module(lightning.LightningModule):
    """A copy of a network and its optimizer."""

    def __init__(self, net, make=make_covon):
        super().__init__()
        self.net, self.make = copy.deepcopy(net), make
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(self.net.weight.detach().clone())
        return nll(self.net, batch)()

    def validation_step(self, batch, index):
        self.validated = weights(self.net)

    def configure_optimizers(self):
        optimizer = self.make(self.net.named_parameters(), seed=3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(module, *callbacks, epochs=2, path=None, size=1, **options):
    """Steps of ``size`` mini-batches."""
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=size, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(DATA, 8), DataLoader(DATA, 48), ckpt_path=path)
    return trainer


def fit_plainly(net, make, size=1, clip=float("inf")):
    """The same without Lightning; the optimizer."""
    optimizer = make(net.named_parameters(), seed=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        accumulate(optimizer, net, list(DataLoader(DATA, 8)), size, clip)
        scheduler.step()
    return optimizer


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("clip", [float("inf"), 0.05])
def test_accumulation_clipping_and_schedule_equal_a_plain_loop(make, size, clip, linear):
    module = Module(linear, make)
    trainer = fit(module, PosteriorCallback(), size=size, gradient_clip_val=clip)
    optimizer = fit_plainly(linear, make, size, clip)
    assert same(module.validated, weights(linear))  # the mean
    optimizer.consolidate()
    assert same(weights(module.net), weights(linear))  # merged
    merged = trainer.optimizers[0].posterior(module.net.named_parameters())
    assert same(merged.precision, optimizer.posterior().precision)
    assert same(merged.mean, module.validated) == (make is make_vcl)
    assert len({w.sum().item() for w in module.seen}) == 12 // size  # a sample each step


class Averaged(Module):
    """Validates with the mean prediction of three samples."""

    def validation_step(self, batch, index):
        self.predicted, self.drawn = 0, []
        for _ in range(3):
            with self.trainer.optimizers[0].sampled_params(train=False):
                self.drawn.append(weights(self.net))
                self.predicted = self.predicted + self.net(batch[0]).softmax(1) / 3


def test_validation_may_average_over_samples(linear):
    module = Averaged(linear)
    fit(module, PosteriorCallback(consolidate=False))
    expected = [torch.func.functional_call(module.net, w, DATA[:][0]) for w in module.drawn]
    torch.testing.assert_close(module.predicted, torch.stack(expected).softmax(2).mean(0))
    assert not any(same(drawn, weights(module.net)) for drawn in module.drawn)


class StopWithin(lightning.Callback):
    """Ends the training, as Lightning's Timer does for ``max_time``, with a validation."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = module.trainer.global_step == 1 and index == 2


def test_validation_within_a_step_sees_the_mean_and_changes_nothing(linear):
    class Validated(Module):
        def validation_step(self, batch, index):
            found.append(weights(self.net))

    found, module, plain = [], Validated(linear), Module(linear)
    fit(module, PosteriorCallback(), size=2, val_check_interval=3)
    fit(plain, PosteriorCallback(), size=2)
    assert same(weights(module.net), weights(plain.net))
    assert not any(torch.equal(mean["weight"], w) for mean in found for w in module.seen)
    stopped, one = Module(linear), Module(linear)
    fit(stopped, PosteriorCallback(), StopWithin(), size=2)
    trainer = fit(one, PosteriorCallback(consolidate=False), size=2, max_steps=1)
    assert same(stopped.validated, weights(one.net))
    trainer.optimizers[0].consolidate()
    assert same(weights(stopped.net), weights(one.net))


def test_the_batch_size_follows_a_schedule_of_the_accumulation(linear):
    class Noting(Module):
        def on_train_epoch_end(self):
            sizes.append(self.trainer.optimizers[0].param_groups[0]["batch_size"])

    sizes, schedule = [], lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    fit(Noting(linear), PosteriorCallback(), schedule, epochs=2)
    assert sizes == [sizes[0], 2 * sizes[0]]


def test_checkpoints_within_a_step_hold_the_mean_and_change_nothing(linear):
    """Lightning writes them on a cluster's signal, for instance."""

    class Saving(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            saved.append(self.state_dict()["net.weight"].clone())
            return loss

    saved, saving, plain = [], Saving(linear), Module(linear)
    fit(saving, PosteriorCallback(), epochs=1, size=2)
    fit(plain, PosteriorCallback(), epochs=1, size=2)
    assert torch.equal(saved[0], linear.weight)
    pairs = zip(saved, saving.seen, strict=True)
    assert not any(torch.equal(mean, sample) for mean, sample in pairs)
    assert same(weights(saving.net), weights(plain.net))
    assert torch.equal(saving.state_dict()["net.weight"], saving.net.weight)  # no hook is left


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_without_the_callback_step_samples_by_itself_and_accumulation_is_an_error(make, linear):
    fit(module := Module(linear, make))
    with pytest.raises(RuntimeError, match=r"outside of a sample: .*Callback"):
        fit(Module(linear, make), size=2)
    fit_plainly(linear, make)
    assert same(weights(module.net), weights(linear))


class Manual(Module):
    """Manual optimization, by the optimizer as Lightning wraps it."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        with optimizer.sampled_params():
            optimizer.zero_grad()
            self.manual_backward(nll(self.net, batch)())
        optimizer.step()

    def on_train_epoch_end(self):
        self.optimizers().consolidate()
        self.lr_schedulers().step()


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_manual_optimization_equals_a_plain_loop(make, linear):
    fit(module := Manual(linear, make))
    optimizer = make(linear.named_parameters(), seed=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        accumulate(optimizer, linear, list(DataLoader(DATA, 8)))
        optimizer.consolidate()
        scheduler.step()
    assert same(weights(module.net), weights(linear))
    with pytest.raises(RuntimeError, match=r"nested: .* PosteriorCallback brings its own"):
        fit(module, PosteriorCallback())


def test_fabric_equals_a_plain_loop(linear):
    fabric = lightning_fabric.Fabric(accelerator="cpu")
    plain = copy.deepcopy(linear)
    net, optimizer = fabric.setup(linear, make_covon(linear.named_parameters(), seed=3))
    other = make_covon(plain.named_parameters(), seed=3)
    for _ in range(2):
        for batch in DataLoader(DATA, 8):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                fabric.backward(nll(net, batch)())
            optimizer.step()
        optimizer.consolidate()
        accumulate(other, plain, list(DataLoader(DATA, 8)))
        other.consolidate()
    assert same(weights(linear), weights(plain))


def test_a_resumed_fit_equals_one_that_nobody_stopped(linear, tmp_path):
    whole, first, second = (Module(linear) for _ in range(3))
    fit(whole, PosteriorCallback(), epochs=4, size=2)
    trainer = fit(first, PosteriorCallback(consolidate=False), size=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(second, PosteriorCallback(), epochs=4, size=2, path=tmp_path / "half.ckpt")
    assert same(weights(second.net), weights(whole.net))


def test_a_compiled_module_equals_a_plain_one(linear):
    plain, module = Module(linear), Module(linear)
    fit(plain, PosteriorCallback())
    fit(torch.compile(module, backend="eager"), PosteriorCallback())
    torch.testing.assert_close(weights(module.net), weights(plain.net))


def test_what_cannot_work_is_one_sentence(linear):
    def adam(params, seed):
        return torch.optim.Adam([p for _, p in params])

    def several(params, seed):
        return make_covon(params, mc_samples=2)

    for make, options, sentence in (
        (adam, {}, "needs one CoVON or BayesByBackprop, got Adam"),
        (several, {}, "got mc_samples = 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit(Module(linear, make), PosteriorCallback(), **options)


def test_training_in_a_process_that_takes_the_posterior_with_it_is_refused(linear, monkeypatch):
    """As by ``ddp_fork``, for which Lightning copies the weights back only."""
    one_task, tasks = PosteriorCallback(consolidate=False), PosteriorCallback()
    monkeypatch.setattr("os.getpid", lambda: -1)
    fit(Module(linear), one_task)
    with pytest.raises(ValueError, match=r"ddp_fork .* is lost when fit ends: use strategy='ddp'"):
        fit(Module(linear), tasks)


def test_an_exception_in_a_batch_leaves_the_mean(linear):
    module, seen = Module(linear), []

    def fail(batch, batch_idx):
        seen.append(weights(module.net))
        raise KeyError("no batch")

    module.training_step = fail
    with pytest.raises(KeyError):
        fit(module, PosteriorCallback())
    assert not same(seen[0], weights(linear))
    assert same(weights(module.net), weights(linear))


def test_batch_norm_is_warned_of_after_the_merge(linear):
    class Normed(Module):
        def training_step(self, batch, index):
            return nll(self.net, batch)()

    with pytest.warns(UserWarning, match="call covon_avalanche.merging.update_batch_norm"):
        fit(Normed(torch.nn.Sequential(torch.nn.BatchNorm1d(4), linear)), PosteriorCallback())


@pytest.mark.parametrize("callbacks", [[], [PosteriorCallback()]])
def test_bfloat16_is_autocast_with_float32_weights(callbacks, linear):
    module, dtypes = Module(linear), set()
    module.net.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    fit(module, *callbacks, epochs=1, precision="bf16-mixed")
    assert dtypes == {torch.bfloat16}
    assert module.net.weight.dtype == torch.float32
    assert not same(weights(module.net), weights(linear))
