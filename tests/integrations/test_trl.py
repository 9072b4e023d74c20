"""CoVON in TRL's SFTTrainer does what it does in a plain loop over the same batches."""

import pytest
import torch
from toy_optimizers import accumulate, relative_distance, same, weights

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="needs the extra language")

from toy_language import Recording, gpt2, make_tokenizer  # noqa: E402

from covon_avalanche import CoVON  # noqa: E402
from covon_avalanche.integrations.huggingface import PosteriorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Recorder(Recording, trl.SFTTrainer):
    pass


def make_model(lora, vocabulary):
    model = gpt2(vocabulary)
    if lora:
        peft = pytest.importorskip("peft", reason="needs the extra language")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    return model


def make_optimizer(model):
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    return CoVON.finetuning(trained, lr=1e-2, generator=generator)


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "max_length": 32}, {"bf16": True}, {"lora": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_sft_equals_a_plain_loop(options, tmp_path):
    lora, settings = options.get("lora", False), dict(options)
    settings.pop("lora", None)
    run, model, optimizer = train(tmp_path, lora, **settings)
    plain = make_model(lora, model.config.vocab_size)
    own = make_optimizer(plain)

    def loss(model, batch):
        return lambda: model(**batch, use_cache=False).loss

    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("bf16", False)):
        accumulate(own, plain, run.batches, clip=1.0, loss=loss)
    own.consolidate()
    start = make_model(lora, model.config.vocab_size)
    assert relative_distance(model, plain, start) < (0.1 if options.get("bf16") else 0.01)
    assert all("lora" in name for name in optimizer.posterior().mean) == lora


def train(folder, lora=False, **settings):
    tokenizer = make_tokenizer()
    model = make_model(lora, len(tokenizer))
    optimizer = make_optimizer(model)
    rows = [{"text": f"{i} + {i} = {2 * i}. " * (1 + i % 3)} for i in range(16)]
    arguments = trl.SFTConfig(
        folder, per_device_train_batch_size=4, max_steps=3, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
        **{"bf16": False, **settings},
    )  # fmt: skip
    run = Recorder(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, optimizers=(optimizer, None), callbacks=[PosteriorCallback()],
    )  # fmt: skip
    run.train()
    return run, model, optimizer


def test_neftune_adds_its_noise_in_training_only(tmp_path):
    _, exact, _ = train(tmp_path)
    _, model, optimizer = train(tmp_path, neftune_noise_alpha=5)
    assert not same(weights(model), weights(exact))
    assert all(s.isfinite().all() for s in optimizer.posterior().precision.values())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)  # no hook is left
