"""CoVON, VCL, Ada-Reg and EWC* in Hugging Face's Trainer do what they do in a plain loop."""

import copy
import sys
from importlib import import_module

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon, make_vcl, same, weights

transformers = pytest.importorskip("transformers", reason="needs the extra language")
pytest.importorskip("accelerate", reason="needs the extra language")

from covon_avalanche.integrations.huggingface import (  # noqa: E402
    AdaRegCallback,
    EWCStarCallback,
    PosteriorCallback,
)
from covon_avalanche.optim.quadratic_anchor import (  # noqa: E402
    QuadraticAnchor,
    adam_second_moments,
)
from covon_avalanche.posterior.fisher import squared_batch_gradients  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """A classifier as the Trainer expects it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x, labels):
        self.seen.append(self.linear.weight.detach().clone())
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
    return [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]


class InOrder(transformers.Trainer):
    """The order of the data, so that a plain loop can follow."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(model, optimizer, folder, epochs=2, accumulate=1, callback=None, **options):
    arguments = transformers.TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        gradient_accumulation_steps=accumulate, max_grad_norm=0.05, disable_tqdm=True,
        logging_strategy="no", **{"save_strategy": "no", **options},
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return InOrder(
        model, arguments, train_dataset=data(), eval_dataset=data(),
        optimizers=(optimizer, constant), callbacks=[callback or PosteriorCallback()],
    )  # fmt: skip


def made(make, model, **options):
    return make(model.named_parameters(), generator=torch.Generator().manual_seed(3), **options)


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_and_clipping_equal_a_plain_loop(make, accumulate, tmp_path):
    model = Model()
    optimizer = made(make, model)
    trainer(model, optimizer, tmp_path, accumulate=accumulate).train()
    plain = Model()
    expected = made(make, plain)
    rows = data()
    for _ in range(2):
        for start in range(0, 48, 8 * accumulate):
            with expected.sampled_params():
                expected.zero_grad()
                for i in range(start, start + 8 * accumulate, 8):
                    batch = rows[i : i + 8]
                    x = torch.stack([row["x"] for row in batch])
                    y = torch.stack([row["labels"] for row in batch])
                    (plain(x, y)["loss"] / accumulate).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            expected.step()
    expected.consolidate()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-5, atol=1e-7)
    assert len({w.sum().item() for w in model.seen}) == 12 // accumulate


def test_evaluation_sees_the_mean_and_a_sample_where_asked(tmp_path):
    model = Model()
    optimizer = made(make_covon, model)
    run = trainer(model, optimizer, tmp_path, eval_strategy="epoch")
    run.train()
    means = {w.sum().item() for w in model.seen[-6:]}  # of the last epoch's evaluation
    assert len(means) == 1
    mean = run.evaluate()["eval_loss"]
    assert run.evaluate()["eval_loss"] == mean
    with optimizer.sampled_params(train=False):
        assert run.evaluate()["eval_loss"] != mean


@pytest.mark.parametrize("then", ["evaluate", "save"])
def test_after_an_interrupt_within_a_step_the_mean_is_evaluated_and_saved(then, tmp_path):
    class Interrupted(Model):
        interrupts = 1

        def forward(self, x, labels):
            if self.interrupts and len(self.seen) == 3:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().forward(x, labels)

    whole = Model()
    trainer(
        whole, made(make_covon, whole), tmp_path, epochs=1, max_steps=3,
        callback=PosteriorCallback(consolidate=False),
    ).train()  # fmt: skip
    model = Interrupted()
    run = trainer(model, made(make_covon, model), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not same(weights(model), weights(whole))  # a sample is in place
    if then == "evaluate":
        run.evaluate()
        found = {"linear.weight": model.seen[-1]}
    else:
        found = model.state_dict()
    assert torch.equal(found["linear.weight"], weights(whole)["linear.weight"])
    assert same(weights(model), weights(whole))
    run.train()  # starts anew, and the hooks go
    assert not model._forward_pre_hooks
    assert not model._state_dict_pre_hooks


def test_a_resumed_training_equals_one_that_nobody_stopped(tmp_path):
    whole = Model()
    trainer(whole, made(make_covon, whole), tmp_path / "a", epochs=4, accumulate=2).train()
    first = Model()
    steps = dict(save_strategy="steps", save_steps=5)
    trainer(first, made(make_covon, first), tmp_path / "b", epochs=4, accumulate=2, **steps).train()
    second = Model()
    again = trainer(second, made(make_covon, second), tmp_path / "b", epochs=4, accumulate=2)
    again.train(resume_from_checkpoint=str(tmp_path / "b/checkpoint-5"))
    assert same(weights(second), weights(whole))


def test_adapters_of_peft_alone_have_a_posterior(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra language")
    base = Model()
    before = copy.deepcopy(base.linear.weight)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["linear"]))
    optimizer = made(make_covon, model)
    run = trainer(model, optimizer, tmp_path, remove_unused_columns=False)
    run.train()
    assert torch.equal(model.base_model.model.linear.base_layer.weight, before)
    assert all("lora" in name for name in optimizer.posterior().mean)


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}]
)
def test_autocast_and_compiled_models(options, tmp_path):
    model, exact = Model(), Model()
    trainer(model, made(make_covon, model), tmp_path, epochs=1, **options).train()
    trainer(exact, made(make_covon, exact), tmp_path, epochs=1).train()
    assert model.linear.weight.dtype == torch.float32
    tolerance = 0.05 if "bf16" in options else 1e-6
    torch.testing.assert_close(weights(model), weights(exact), rtol=0, atol=tolerance)
    assert same(weights(model), weights(exact)) == ("bf16" not in options)


class Plain(nn.Module):
    """The model for a loop over batches of inputs and labels."""

    def __init__(self, model):
        super().__init__()
        self.linear = model.linear

    def forward(self, x):
        return self.linear(x)


def anchored_loop(kind, tasks=2, epochs=2):
    """Ada-Reg or EWC* without the Trainer."""
    model = Plain(Model())
    named = list(model.named_parameters())
    anchor = QuadraticAnchor(named, ess=48, strength=1e3)
    x, y = (torch.stack([row[key] for row in data()]) for key in ("x", "labels"))
    batches = list(zip(x.split(8), y.split(8), strict=True))
    for _ in range(tasks):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        with anchor.pulling(optimizer):
            for inputs, labels in batches * epochs:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        if kind is AdaRegCallback:
            anchor.add(adam_second_moments(named, optimizer))
        else:
            anchor.add(squared_batch_gradients(model, batches))
    return anchor.gaussian


@pytest.mark.parametrize("kind", [AdaRegCallback, EWCStarCallback])
def test_anchors_equal_a_plain_loop(kind, tmp_path):
    model = Model()
    callback = kind(ess=48, strength=1e3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(2):
        trainer(model, optimizer, tmp_path, callback=callback).train()
        if kind is EWCStarCallback:
            optimizer.state.clear()
    expected = anchored_loop(kind)
    for name, mean in expected.mean.items():
        torch.testing.assert_close(callback.gaussian.mean[name], mean)
        torch.testing.assert_close(callback.gaussian.precision[name], expected.precision[name])
    free = Model()
    strong = kind(ess=48, strength=0.0)
    optimizer = torch.optim.AdamW(free.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(2):
        trainer(free, optimizer, tmp_path, callback=strong).train()
    assert not torch.allclose(free.linear.weight, model.linear.weight, atol=1e-3)


def test_the_trainers_own_optimizer_has_an_anchor_and_stops_pulling_at_the_end(tmp_path):
    model = Model()
    run = trainer(model, torch.optim.AdamW(model.parameters()), tmp_path)
    run = InOrder(
        model, run.args, train_dataset=data(), callbacks=[callback := AdaRegCallback(ess=48)]
    )
    run.train()
    assert set(callback.gaussian.mean) == {"linear.weight", "linear.bias"}
    assert all((s > 0).any() for s in callback.gaussian.precision.values())
    assert not run.optimizer.optimizer._optimizer_step_pre_hooks


def test_ada_reg_resumes(tmp_path):
    """Adam's state, restored from the checkpoint, is not cleared."""

    def made(folder, **options):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        callback = AdaRegCallback(ess=48)
        return trainer(model, optimizer, folder, epochs=4, callback=callback, **options), callback

    whole, expected = made(tmp_path / "a")
    whole.train()
    first, _ = made(tmp_path / "b", save_strategy="steps", save_steps=9)
    first.train()
    second, found = made(tmp_path / "b")
    second.train(resume_from_checkpoint=str(tmp_path / "b/checkpoint-9"))
    assert same(found.gaussian.precision, expected.gaussian.precision)


def test_ewc_star_takes_as_many_batches_as_asked(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    callback = EWCStarCallback(ess=1, batches=2)
    trainer(model, optimizer, tmp_path, callback=callback).train()
    x, y = (torch.stack([row[key] for row in data()]) for key in ("x", "labels"))
    batches = list(zip(x.split(8), y.split(8), strict=True))[:2]
    expected = squared_batch_gradients(Plain(model), batches)
    assert same(callback.gaussian.precision, expected)


def test_what_cannot_work_is_one_sentence(tmp_path):
    model = Model()
    for optimizer, sentence in (
        (torch.optim.AdamW(model.parameters()), r"got AdamW: pass optimizers=\(optimizer, None\)"),
        (made(make_covon, model, mc_samples=2), "got mc_samples = 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            trainer(model, optimizer, tmp_path).train()
    adamw = torch.optim.AdamW(model.parameters())
    for callback, optimizer, sentence in (
        (AdaRegCallback(ess=1), made(make_covon, model), r"Adam family .*got CoVON"),
        (EWCStarCallback(ess=1), made(make_covon, model), "got CoVON, which has a prior"),
        (AdaRegCallback(ess=1), torch.optim.SGD(model.parameters(), 0.1), r"family .*got SGD"),
    ):
        with pytest.raises(ValueError, match=sentence):
            trainer(model, optimizer, tmp_path, callback=callback).train()
    for options in ({"ess": 0}, {"ess": 1, "strength": -1.0}, {"ess": 1, "batches": 0}):
        with pytest.raises(ValueError, match=f"{list(options)[-1]} must be"):
            EWCStarCallback(**options)
    half = Model().half()
    with pytest.raises(ValueError, match=r"'linear.weight' is torch.float16: noise .* vanishes"):
        trainer(half, made(make_covon, half), tmp_path).train()
    for name, value, sentence in (
        ("deepspeed", {}, "DeepSpeed steps copies of the weights, .* use DDP"),
        ("fsdp", ["full_shard"], "FSDP in the Trainer is not supported"),
    ):
        for callback, optimizer in (
            (PosteriorCallback(), made(make_covon, model)),
            (AdaRegCallback(ess=1), adamw),
        ):
            run = trainer(model, optimizer, tmp_path, callback=callback)
            object.__setattr__(run.args, name, value)
            with pytest.raises(ValueError, match=sentence):
                callback.on_train_begin(run.args, run.state, run.control, model=model,
                                        optimizer=optimizer)  # fmt: skip


def test_without_transformers_the_extra_is_named(monkeypatch):
    name = PosteriorCallback.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'covon_avalanche\[language\]'"):
        import_module(name)
