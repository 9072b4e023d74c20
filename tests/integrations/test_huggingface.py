"""CoVON, VCL, Ada-Reg and EWC* in Hugging Face's Trainer do what they do in a plain loop."""

import copy
import sys
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from terminal import torchrun
from torch import nn
from toy_optimizers import accumulate, make_covon, make_vcl, nll, relative_distance, same, weights

transformers = pytest.importorskip("transformers", reason="needs the extra language")
pytest.importorskip("accelerate", reason="needs the extra language")

from toy_language import Recording, gpt2, make_tokenizer  # noqa: E402

from covon_avalanche import CoVON  # noqa: E402
from covon_avalanche.integrations.huggingface import PosteriorCallback, shard  # noqa: E402
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments  # noqa: E402
from covon_avalanche.posterior.fisher import squared_batch_gradients  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """A classifier as the Trainer expects it; without labels, as a plain loop does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x, labels=None):
        self.seen.append(self.linear.weight.detach().clone())
        logits = self.linear(x)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


X, Y = torch.randn(48, 4), torch.randint(3, (48,))
ROWS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
BATCHES = list(zip(X.split(8), Y.split(8), strict=True))
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


class InOrder(transformers.Trainer):
    """The order of the data, so that a plain loop can follow."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(model, optimizer, folder, callback=None, epochs=2, size=1, **options):
    """For steps of ``size`` mini-batches; without an optimizer, the Trainer makes its own."""
    arguments = transformers.TrainingArguments(
        folder, num_train_epochs=epochs, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=size, max_grad_norm=0.05, logging_strategy="no",
        lr_scheduler_type="constant",
        **{"save_strategy": "no", "per_device_train_batch_size": 8, **options},
    )  # fmt: skip
    return InOrder(
        model, arguments, train_dataset=ROWS, eval_dataset=ROWS, optimizers=(optimizer, None),
        callbacks=[callback or PosteriorCallback()],
    )  # fmt: skip


def fit(folder, make=make_covon, model=None, resume=None, **options):
    """A model after training."""
    model = model or Model()
    run = trainer(model, make(model.named_parameters(), seed=3), folder, **options)
    run.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("make", [make_covon, make_vcl])
@pytest.mark.parametrize("size", [1, 3])
def test_accumulation_and_clipping_equal_a_plain_loop(make, size, tmp_path):
    model, plain = fit(tmp_path, make, size=size), Model()
    optimizer = make(plain.named_parameters(), seed=3)
    accumulate(optimizer, plain, BATCHES * 2, size, clip=0.05)
    optimizer.consolidate()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-7)
    assert len({w.sum().item() for w in model.seen}) == 12 // size


class TakesAnything(Model):
    """Looks to the Trainer as if it divided its loss by ``num_items_in_batch``."""

    def forward(self, x, labels=None, **ignored):
        return super().forward(x, labels)


def test_a_loss_that_ignores_the_number_of_items_is_averaged_where_the_model_says_so(tmp_path):
    """As docs/how-to/common-mistakes.md says."""
    plain, wrong, right = fit(tmp_path, size=3), TakesAnything(), TakesAnything()
    right.accepts_loss_kwargs = False
    for model in (wrong, right):
        fit(tmp_path, model=model, size=3)
    assert same(weights(right), weights(plain))
    assert not same(weights(wrong), weights(plain))


def test_evaluation_sees_the_mean_and_a_sample_where_asked(tmp_path):
    model = Model()
    optimizer = make_covon(model.named_parameters())
    run = trainer(model, optimizer, tmp_path, eval_strategy="epoch")
    run.train()
    means = {w.sum().item() for w in model.seen[-6:]}  # of the last epoch's evaluation
    assert len(means) == 1
    mean = run.evaluate()["eval_loss"]
    assert run.evaluate()["eval_loss"] == mean
    with optimizer.sampled_params(train=False):
        assert run.evaluate()["eval_loss"] != mean


class WithinSteps(transformers.TrainerCallback):
    """Evaluates, also with a sample, and saves, as transformers' own callback does on SIGTERM."""

    def __init__(self, run):
        self.run = run

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.mean = weights(model)

    def on_substep_end(self, args, state, control, model, optimizer, **kwargs):
        self.run.evaluate()
        assert torch.equal(model.seen[-1], self.mean["linear.weight"])
        group = optimizer.param_groups[0]
        draws = group["noise_draws"]
        with optimizer.optimizer.sampled_params(train=False):
            self.run.evaluate()
        was_mean = torch.equal(model.seen[-1], self.mean["linear.weight"])
        assert was_mean == (state.global_step == 0)  # before it there is no posterior
        group["noise_draws"] = draws

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        assert torch.equal(model.state_dict()["linear.weight"], self.mean["linear.weight"])
        self.run._save_checkpoint(model, trial=None)


def test_callbacks_may_evaluate_and_save_the_mean_within_a_step(tmp_path):
    model = Model()
    optimizer = make_covon(model.named_parameters(), seed=3)
    run = trainer(model, optimizer, tmp_path, size=2)
    run.callback_handler.callbacks.insert(0, WithinSteps(run))  # where the Trainer has its own
    run.train()
    assert same(weights(model), weights(fit(tmp_path, size=2)))


class Interrupting(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *_, **kwargs):
        raise KeyboardInterrupt


def test_a_sample_that_an_interrupt_left_does_not_join_a_loop_of_ones_own(tmp_path):
    """After an evaluation, which has put the mean in its place."""
    model = Model()
    optimizer = make_covon(model.named_parameters(), seed=3)
    run = trainer(model, optimizer, tmp_path)
    run.callback_handler.callbacks.insert(0, Interrupting())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.evaluate()
    plain = Model()
    own = make_covon(plain.named_parameters(), seed=3)
    with own.sampled_params():  # the draw of the interrupted step
        pass
    for net, its in ((model, optimizer), (plain, own)):
        its.zero_grad()
        accumulate(its, net, BATCHES)
    assert same(weights(model), weights(plain))


@pytest.mark.parametrize("then", ["evaluate", "save", "train again"])
def test_after_an_interrupt_within_a_step_the_mean_is_evaluated_and_saved(then, tmp_path):
    class Interrupted(Model):
        interrupts = 1

        def forward(self, x, labels):
            if self.interrupts and len(self.seen) == 3:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().forward(x, labels)

    whole = fit(tmp_path, max_steps=3, callback=PosteriorCallback(consolidate=False))
    model = Interrupted()
    run = trainer(model, make_covon(model.named_parameters(), seed=3), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not same(weights(model), weights(whole))  # a sample is in place
    if then == "evaluate":
        run.evaluate()
        assert torch.equal(model.seen[-1], whole.linear.weight)
    elif then == "save":
        assert torch.equal(model.state_dict()["linear.weight"], whole.linear.weight)
    if then != "train again":
        assert same(weights(model), weights(whole))
    run.train()  # starts anew, and the hooks go
    assert not model._forward_pre_hooks
    assert not model._state_dict_pre_hooks


def test_a_resumed_training_equals_one_that_nobody_stopped(tmp_path):
    options = dict(epochs=4, size=2, save_strategy="steps", save_steps=5)
    whole = fit(tmp_path, **options)
    again = fit(tmp_path, **options, resume=str(tmp_path / "checkpoint-5"))
    assert same(weights(again), weights(whole))


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_resuming_without_the_posterior_is_refused(make, tmp_path):
    options = dict(save_strategy="epoch", save_only_model=True)
    fit(tmp_path, make, **options)
    with pytest.raises(ValueError, match=r"of step 6 was saved without .*\(save_only_model=True\?"):
        fit(tmp_path, make, **options, resume=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_the_best_weights_are_merged_with_their_own_precision(make, tmp_path):
    """The highest loss, which is that of the first epoch, counts as best here."""
    found = []
    best = dict(load_best_model_at_end=True, greater_is_better=True, eval_strategy="epoch")
    for epochs, options in ((1, {}), (3, {**best, "save_strategy": "epoch"})):
        model = Model()
        optimizer = make(model.named_parameters(), seed=3)
        run = trainer(model, optimizer, tmp_path, epochs=epochs, **options)
        run.train()
        found.append(optimizer.posterior())
    assert run.state.best_model_checkpoint.endswith("checkpoint-6")
    assert same(dict(found[0].mean), dict(found[1].mean))
    assert same(dict(found[0].precision), dict(found[1].precision))
    model = Model()
    run = trainer(
        model, make(model.named_parameters()), tmp_path, **best, save_strategy="epoch",
        save_only_model=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"save_only_model=True saves .* without the posterior"):
        run.train()
    assert not model.seen  # before the training


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_a_step_that_the_end_of_a_streaming_epoch_interrupts_is_dropped(strategy, tmp_path):
    """Six micro-batches are one step of four."""
    model = Model()
    plain = copy.deepcopy(model)
    optimizer, own = (make_covon(m.named_parameters()) for m in (model, plain))
    options = {"max_steps": 3, "eval_strategy": strategy}
    run = trainer(model, optimizer, tmp_path, size=4, **options)
    run.train_dataset = Stream()
    run.train()
    for _ in range(3):
        accumulate(own, plain, BATCHES[:4], size=4, clip=0.05)
        with own.sampled_params():  # the draw of the dropped step
            pass
        own.discard_samples()
    own.consolidate()
    torch.testing.assert_close(weights(model), weights(plain))


def test_adapters_of_peft_alone_have_a_posterior_as_in_a_plain_loop(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra language")
    base = Model()
    before = copy.deepcopy(base.linear.weight)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["linear"]))
    plain = copy.deepcopy(model)
    optimizer, own = (make_covon(m.named_parameters()) for m in (model, plain))
    trainer(model, optimizer, tmp_path, remove_unused_columns=False).train()
    assert torch.equal(model.base_model.model.linear.base_layer.weight, before)
    assert all("lora" in name for name in optimizer.posterior().mean)
    accumulate(own, plain, BATCHES * 2, clip=0.05)
    own.consolidate()
    torch.testing.assert_close(dict(optimizer.posterior().mean), dict(own.posterior().mean))


@pytest.mark.parametrize("options", [{"bf16": True}, COMPILED])
def test_autocast_and_compiled_models(options, tmp_path):
    model, exact = fit(tmp_path, epochs=1, **options), fit(tmp_path, epochs=1)
    assert model.linear.weight.dtype == torch.float32
    tolerance = 0.05 if "bf16" in options else 1e-6
    torch.testing.assert_close(weights(model), weights(exact), rtol=0, atol=tolerance)
    assert same(weights(model), weights(exact)) == ("bf16" not in options)


class Recorder(Recording, transformers.Trainer):
    pass


GROUP_BY_LENGTH = (  # renamed in Transformers 5.2
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(transformers.TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


def lengths(batches):
    return [tuple(batch["attention_mask"].sum(1).tolist()) for batch in batches]


@pytest.mark.parametrize(
    "options",
    [{}, GROUP_BY_LENGTH, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.3}],
    ids=lambda options: next(iter(options), "none"),
)
def test_options_for_language_models_equal_a_plain_loop(options, tmp_path):
    generator = torch.Generator().manual_seed(0)
    sizes = [4, 15, 5, 14, 6, 13, 3, 16] * 8
    rows = [torch.randint(1, 20, (n,), generator=generator).tolist() for n in sizes]
    rows = [  # the first token is not predicted, but the Trainer would count it
        {"input_ids": r, "labels": [-100, *r[1:]], "attention_mask": [1] * len(r)} for r in rows
    ]

    pad = transformers.DataCollatorForTokenClassification(make_tokenizer())
    model, plain, start = (gpt2(20, layers=2) for _ in range(3))
    optimizer, own = (
        CoVON.finetuning(m.named_parameters(), lr=1e-3, generator=torch.Generator().manual_seed(3))
        for m in (model, plain)
    )
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=12, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        max_grad_norm=1.0, disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
        **options,
    )  # fmt: skip
    own_step = {"optimizers": (optimizer, None), "callbacks": [PosteriorCallback()]}
    run = Recorder(model, arguments, pad, rows, **own_step)
    run.train()
    assert len(run.batches) == 12
    smoothed = nn.CrossEntropyLoss(label_smoothing=options.get("label_smoothing_factor", 0.0))

    def loss(model, batch):
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return lambda: smoothed(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    accumulate(own, plain, run.batches, clip=1.0, loss=loss)
    own.consolidate()
    assert relative_distance(model, plain, start) < 1e-3
    spread = [max(found) - min(found) for found in lengths(run.batches)]
    assert (sum(spread) / len(spread) < 5) == ("group" in str(options))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)


def plain_training(model, optimizer, folder):
    for batch in BATCHES * 2:
        optimizer.zero_grad()
        nll(model, batch)().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return BATCHES


def trainers_training(model, optimizer, folder):
    run = trainer(model, optimizer, folder, transformers.TrainerCallback())
    run.train()
    return ((batch, batch["labels"]) for batch in run.get_train_dataloader())


def anchored(kind, train, folder, strength=1e3):
    """The anchor after two tasks of Ada-Reg or EWC*."""
    model = Model()
    anchor = QuadraticAnchor(model.named_parameters(), ess=48, strength=strength)
    for _ in range(2):
        optimizer = adamw(model)
        with anchor.pulling(optimizer):
            batches = train(model, optimizer, folder)
        if kind == "ada-reg":
            anchor.add(adam_second_moments(model.named_parameters(), optimizer))
        elif train is plain_training:
            anchor.add(squared_batch_gradients(model, batches))
        else:
            anchor.add(squared_batch_gradients(model, batches, lambda output, _: output["loss"]))
    return anchor.gaussian


@pytest.mark.parametrize("kind", ["ada-reg", "ewc-star"])
def test_anchors_equal_a_plain_loop(kind, tmp_path):
    found, free = (anchored(kind, trainers_training, tmp_path, s) for s in (1e3, 0.0))
    expected = anchored(kind, plain_training, tmp_path)
    torch.testing.assert_close(dict(found.mean), dict(expected.mean))
    torch.testing.assert_close(dict(found.precision), dict(expected.precision))
    assert not torch.allclose(free.mean["linear.weight"], found.mean["linear.weight"], atol=1e-3)


def test_the_batch_size_is_that_of_the_steps_and_parameters_have_names(tmp_path):
    """Even if the Trainer finds a smaller batch size, or makes the optimizer."""
    model, callback = Model(), PosteriorCallback(consolidate=False)
    optimizer = make_covon(model.parameters(), batch_size=999)
    run = trainer(model, optimizer, tmp_path, callback, size=3, epochs=1)
    run.train()
    assert optimizer.param_groups[0]["batch_size"] == 24
    run.args.auto_find_batch_size, run.state.train_batch_size = True, 7
    callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["batch_size"] == 21
    assert set(optimizer.prior().mean) == {"linear.weight", "linear.bias"}


def test_the_batch_size_is_that_of_the_resumed_training_not_of_its_checkpoint(tmp_path):
    options = dict(save_strategy="epoch", epochs=2, callback=PosteriorCallback(consolidate=False))
    fit(tmp_path, **options)
    model = Model()
    optimizer = make_covon(model.named_parameters())
    run = trainer(model, optimizer, tmp_path, size=2, **options, per_device_train_batch_size=4)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert optimizer.param_groups[0]["batch_size"] == 8


@pytest.mark.parametrize(("split", "expected"), [(False, 48), (True, 24)])
def test_the_batch_size_is_that_of_all_processes(split, expected, monkeypatch, tmp_path):
    model, callback = Model(), PosteriorCallback()
    optimizer = make_covon(model.named_parameters())
    run = trainer(model, optimizer, tmp_path, size=3, accelerator_config={"split_batches": split})
    monkeypatch.setattr(type(run.args), "world_size", 2)
    run.state.train_batch_size = 8
    callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["batch_size"] == expected


def test_a_flat_prior_of_the_trainers_groups_is_refused(tmp_path):
    arguments = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    run = transformers.Trainer(
        Model(), arguments, train_dataset=ROWS, callbacks=[PosteriorCallback()],
        optimizer_cls_and_kwargs=(CoVON, {"ess": 100.0, "batch_size": 8}),
    )  # fmt: skip
    with pytest.raises(ValueError, match="weight_decay=0 makes the prior flat"):
        run.train()


def test_what_cannot_work_is_one_sentence(tmp_path):
    model = Model()
    covon, posterior = make_covon(model.named_parameters()), PosteriorCallback()
    for optimizer, sentence in (
        (adamw(model), r"got AdamW: pass optimizers=\(optimizer, None\)"),
        (make_covon(model.parameters(), mc_samples=2), "got mc_samples = 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            trainer(model, optimizer, tmp_path, posterior).train()
    for name, value, sentence in (
        ("deepspeed", {}, "DeepSpeed steps copies of the weights, .* use DDP"),
        ("fsdp", ["full_shard"], r"call .*shard\(model\) before the optimizer is created"),
    ):
        run = trainer(model, covon, tmp_path, posterior)
        object.__setattr__(run.args, name, value)
        with pytest.raises(ValueError, match=sentence):
            posterior.on_train_begin(run.args, run.state, run.control, model=model,
                                     optimizer=covon)  # fmt: skip


def test_an_optimizer_of_other_parameters_is_refused_before_the_training(tmp_path):
    """As from before PEFT, which TRL applies by ``peft_config``, freezes them."""
    peft = pytest.importorskip("peft", reason="needs the extra language")
    model = Model()
    frozen, other = make_covon(model.named_parameters()), make_covon(Model().named_parameters())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["linear"]))
    for optimizer in (frozen, other):
        with pytest.raises(ValueError, match=r"\(not its name\), .*\(get_peft_model inst"):
            trainer(wrapped, optimizer, tmp_path, remove_unused_columns=False).train()


def test_without_the_callback_the_error_names_it(tmp_path):
    model = Model()
    none = transformers.TrainerCallback()
    with pytest.raises(RuntimeError, match=r"Trainer: callbacks=\[PosteriorCallback\(\)\]"):
        trainer(model, make_covon(model.named_parameters()), tmp_path, none).train()


def test_sharding_needs_a_trainer_that_trains_sharded_models():
    class Old(nn.Module):
        """Of a transformers that shards by Accelerate only."""

    with pytest.raises(ValueError, match="wraps sharded models in DDP: upgrade it"):
        shard(Old())


def test_without_transformers_the_extra_is_named(monkeypatch):
    name = PosteriorCallback.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'covon_avalanche\[language\]'"):
        import_module(name)


class Normed(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, labels=None):
        logits = self.norm(self.linear(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class WithoutLoss(Normed):
    def forward(self, x):
        return self.norm(self.linear(x))


class OwnLoss(InOrder):
    def compute_loss(self, model, inputs, *args, **kwargs):
        logits = model(inputs["x"])
        return nn.functional.cross_entropy(logits, inputs["labels"])


def check_batch_norm(model):
    means = torch.stack([model.linear(x).mean(0) for x, _ in BATCHES]).mean(0)
    torch.testing.assert_close(model.norm.running_mean, means)


def test_batch_norm_has_the_statistics_of_the_merged_weights(tmp_path):
    check_batch_norm(fit(tmp_path, model=Normed()))


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from islice(cycle(ROWS), 1000)
        raise AssertionError("read without end")


def test_batch_norm_has_the_statistics_of_an_endless_stream(tmp_path):
    model = Normed()
    run = trainer(model, make_covon(model.named_parameters()), tmp_path, max_steps=3, size=2)
    run.train_dataset = Endless()
    run.train()
    check_batch_norm(model)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_batch_norm_has_the_statistics_of_all_processes_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    script = """
import torch
torch.manual_seed(0)
from test_huggingface import Normed, check_batch_norm, make_covon, trainer
model = Normed()
trainer(model, make_covon(model.named_parameters()), "out", ddp_backend="gloo").train()
check_batch_norm(model)
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    torchrun(tmp_path / "script.py")


@pytest.mark.parametrize("options", [{}, COMPILED])
def test_batch_norm_of_a_model_without_labels_has_them_too(options, tmp_path):
    """Whose loss is that of the Trainer's ``compute_loss``."""
    model = WithoutLoss()
    optimizer = make_covon(model.named_parameters())
    run = trainer(model, optimizer, tmp_path, remove_unused_columns=False, **options)
    run.__class__ = OwnLoss
    run.train()
    check_batch_norm(model)
