"""The scripts in examples/language, with a tiny random model and tiny data in their formats."""

import json
import math
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from terminal import torchrun

transformers = pytest.importorskip("transformers", reason="needs the extra language")
for extra in ("accelerate", "datasets", "peft"):
    pytest.importorskip(extra, reason="needs the extra language")

from toy_language import gpt2, make_tokenizer  # noqa: E402
from transformers import PreTrainedTokenizerFast, TrainerCallback  # noqa: E402

from covon_avalanche import DiagGaussian  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples/language"
pytestmark = pytest.mark.filterwarnings("ignore")
two_processes = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path):
    """The folder of a random GPT-2 and a byte-level tokenizer."""
    tokenizer = make_tokenizer()
    for part in (tokenizer, gpt2(len(tokenizer))):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class RecordRates(TrainerCallback):
    """The largest learning rate of each training."""

    def __init__(self):
        self.rates = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.rates.append(0.0)

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.rates[-1] = max(self.rates[-1], optimizer.param_groups[0]["lr"])


class StopAfterSaving(RecordRates):
    """Saves each step, and interrupts the second task after two."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        if Path(args.output_dir).name in ("code", "de") and state.global_step == 2:
            raise KeyboardInterrupt


def run(name, monkeypatch, *arguments, callback=RecordRates):
    """What a script leaves in its namespace, and the learning rates."""
    record = callback()
    init = transformers.Trainer.__init__

    def with_record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_callback(record)

    monkeypatch.setattr(transformers.Trainer, "__init__", with_record)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return record.rates


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def reasoning_files(folder):
    """GSM8K, Code-Alpaca and ARC, twelve rows each."""
    code = [{"instruction": f"print {i}", "input": "", "output": f"print({i})"} for i in range(12)]
    (folder / "code.json").write_text(json.dumps(code), encoding="utf-8")
    math = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(12)]
    choices = {"label": ["A", "B"], "text": ["one", "two"]}
    arc = [{"question": f"Is it {i}?", "choices": choices, "answerKey": "A"} for i in range(12)]
    return [
        "--math", write(folder / "math.jsonl", math), "--code", folder / "code.json",
        "--reasoning", write(folder / "arc.jsonl", arc),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "settings", "expected"),
    [
        ([], [], [2e-5] * 3),
        (["--lora", 2], ["--lr", 1e-4], [1e-4] * 3),
        ([], ["--paper"], [3e-3, 3e-1, 3e-1]),
    ],
)
def test_finetune(model, lora, settings, expected, monkeypatch, tmp_path, capsys):
    """With a harness that scores 0.5."""
    asked = []

    def simple_evaluate(network, **options):
        asked.append(options)
        return {"results": {"gsm8k": 0.5}}

    for name, content in (
        ("lm_eval", {"simple_evaluate": simple_evaluate}),
        ("lm_eval.models", {}),
        ("lm_eval.models.huggingface", {"HFLM": lambda network, tokenizer: (network, tokenizer)}),
    ):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    rates = run(
        "finetune.py", monkeypatch, "--model", model, *reasoning_files(tmp_path), *lora, *settings,
        "--max-steps", 2, "--valid", 4, "--score", "gsm8k", "--output", tmp_path / "out",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert [f"after {name}: loss math" in printed for name in ("math", "code", "reasoning")]
    assert printed.count("{'gsm8k': 0.5}") == 3  # after each task
    assert asked == [{"tasks": ["gsm8k"], "gen_kwargs": "max_gen_toks=1024"}] * 3
    assert rates == pytest.approx(expected)
    saved = {path.name for path in (tmp_path / "out/reasoning").iterdir()}
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in saved


def test_labels_are_on_the_answers_only(model, tmp_path):
    module = runpy.run_path(str(EXAMPLES / "finetune.py"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    files = reasoning_files(tmp_path)[1::2]
    answers = []
    for file in files:
        (row, *_) = module["examples"](str(file), tokenizer, 512)
        kept = [token for token in row["labels"] if token != -100]
        assert row["input_ids"][-len(kept) :] == kept
        answers.append(tokenizer.decode(kept))
        prompt = tokenizer.decode(row["input_ids"][: -len(kept)])
    assert answers == [" #### 1<|end|>", " print(0)<|end|>", " A<|end|>"]
    assert prompt == "Question: Is it 0?\nA. one\nB. two\nAnswer:"
    assert len(module["examples"](str(files[0]), tokenizer, 5)) == 0  # no answer is left


def test_finetune_errors_are_one_sentence(model, monkeypatch, tmp_path):
    config = model / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    del settings["pad_token"]
    config.write_text(json.dumps(settings))
    files = reasoning_files(tmp_path)
    for given in ([], ["--pad-token", "<unknown>"]):
        with pytest.raises(SystemExit, match="has no padding token: pass --pad-token"):
            run("finetune.py", monkeypatch, "--model", model, *files, *given)
    config.write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(SystemExit, match="has no end token for answers"):
        run("finetune.py", monkeypatch, "--model", model, *files, "--pad-token", "<|end|>")
    config.write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match="--score evaluates on one process"):
        run("finetune.py", monkeypatch, "--model", model, *files, "--score", "x", "--shard")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"--score needs .*: pip install lm_eval"):
        run(
            "finetune.py", monkeypatch, "--model", model, *files, "--pad-token", "<|end|>",
            "--max-steps", 1, "--valid", 4, "--score", "gsm8k",
        )  # fmt: skip


@pytest.mark.parametrize("options", [["--max-steps", 3], ["--lora", 2]])
def test_finetuning_resumes_with_the_same_result(options, model, monkeypatch, tmp_path):
    files = reasoning_files(tmp_path)
    arguments = ["--model", model, *files, *options, "--lr", 1e-3, "--valid", 4, "--output"]
    with monkeypatch.context() as patch:
        run("finetune.py", patch, *arguments, "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run("finetune.py", patch, *arguments, "parts", "--resume", callback=StopAfterSaving)
    run("finetune.py", monkeypatch, *arguments, "parts", "--resume")
    for task in ("math", "code", "reasoning"):
        (file,) = (file.name for file in Path("whole", task).glob("*model.safetensors"))
        one, two = (load_file(Path(name, task, file)) for name in ("whole", "parts"))
        assert all(value.equal(two[name]) for name, value in one.items()), task


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"--math bad\.jsonl cannot be read as math"),
        ('{"question": "1 + 1?"}', r"cannot be read as math: KeyError\('answer'\)"),
        ('{"question": "1 + 1?", "answer": null}', "cannot be read as math: TypeError"),
        ('{"question": "1 + 1?", "answer": "2"}', "must be > 0 and below the 1 examples of math"),
    ],
)
def test_bad_data_is_one_sentence(content, message, model, monkeypatch, tmp_path):
    Path("bad.jsonl").write_text(content)
    files = [*reasoning_files(tmp_path), "--math", "bad.jsonl"]
    with pytest.raises(SystemExit, match=message):
        run("finetune.py", monkeypatch, "--model", model, *files)


def test_examples_are_no_longer_than_the_model_allows(model, monkeypatch, tmp_path):
    config = json.loads((model / "config.json").read_text())
    gpt2(config["vocab_size"], positions=64).save_pretrained(model)
    files = reasoning_files(tmp_path)
    long = {"question": "1 + 1?", "answer": "2 " * 100}
    files[1] = write(tmp_path / "math.jsonl", [long] * 12)
    run("finetune.py", monkeypatch, "--model", model, *files, "--max-steps", 1, "--valid", 4)


def languages(folder, model):
    """Two corpora of nine documents, and small settings."""
    for name in ("en", "de"):
        write(folder / f"{name}.jsonl", [{"text": f"{name} and {i} is. " * 20} for i in range(9)])
    return [
        "--corpus", "en=en.jsonl", "--corpus", "de=de.jsonl", "--small", "--tokenizer", model,
        "--steps", 3, "--warmup", 1, "--context", 32, "--valid", 3, "--batch-size", 2,
        "--accumulate", 2, "--output",
    ]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["covon", "covon-paper"])
def test_pretraining_resumes_with_the_same_result(optimizer, model, monkeypatch, tmp_path):
    arguments = ["--optimizer", optimizer, *languages(tmp_path, model)]
    with monkeypatch.context() as patch:
        run("pretrain.py", patch, *arguments, "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run("pretrain.py", patch, *arguments, "parts", callback=StopAfterSaving)
    assert not (tmp_path / "parts/de.safetensors").exists()
    with monkeypatch.context() as patch:
        run("pretrain.py", patch, *arguments, "parts", "--resume")
    for language in ("en", "de"):
        one, two = (load_file(f"{name}/{language}.safetensors") for name in ("whole", "parts"))
        assert all(value.equal(two[name]) for name, value in one.items()), language
    with pytest.raises(SystemExit, match="parts is not empty: pass --resume"):
        run("pretrain.py", monkeypatch, *arguments, "parts")


@pytest.mark.parametrize("optimizer", ["covon", "covon-paper", "adamw"])
def test_pretrain(model, optimizer, monkeypatch, tmp_path, capsys):
    write(tmp_path / "en.jsonl", [{"text": "one and one is two. " * 20}] * 12)
    (tmp_path / "de.txt").write_text("eins und eins ist zwei. " * 20 + "\n" * 3, encoding="utf-8")
    rates = run(
        "pretrain.py", monkeypatch, "--corpus", "en=en.jsonl", "--corpus", "de=de.txt", "--small",
        "--tokenizer", model, "--steps", 4, "--warmup", 2, "--context", 32, "--batch-size", 4,
        "--accumulate", 2, "--valid", 3, "--optimizer", optimizer, "--output", tmp_path / "out",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "after en: perplexity en" in printed
    assert "after de: perplexity en" in printed
    # One warm-up and decay over both languages, or one for each.
    expected = (
        [0.972, 0.972 * (1 + math.cos(math.pi / 3)) / 2]
        if optimizer == "covon-paper"
        else [6e-4] * 2
    )
    assert rates == pytest.approx(expected)
    posterior = tmp_path / "out/de.safetensors"
    assert posterior.exists() == (optimizer != "adamw")
    if posterior.exists():
        assert "transformer.wte.weight" in DiagGaussian.load(posterior).mean


def test_documents_of_a_text_file_are_separated_by_blank_lines(model, tmp_path):
    (tmp_path / "en.txt").write_text("1 + 1 = 2\n1 + 1 =\n\n\n2 + 1\n", encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    module = runpy.run_path(str(EXAMPLES / "pretrain.py"))
    rows = module["sequences"](str(tmp_path / "en.txt"), tokenizer, 1)
    text = tokenizer.decode([token for row in rows for token in row["input_ids"]])
    assert text == "1 + 1 = 2\n1 + 1 =<|end|>2 + 1<|end|>"


def test_a_corpus_without_text_to_train_on_is_one_sentence(model, monkeypatch, tmp_path):
    (tmp_path / "en.txt").write_text("short\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"--valid must be > 0 and below the 0 sequences of en"):
        run("pretrain.py", monkeypatch, "--corpus", "en=en.txt", "--small", "--tokenizer", model)
    Path("empty.jsonl").touch()
    with pytest.raises(SystemExit, match=r"--corpus en=empty\.jsonl cannot be read as text"):
        run("pretrain.py", monkeypatch, "--corpus", "en=empty.jsonl", "--tokenizer", model)
    with pytest.raises(SystemExit, match=r"--corpus en\.txt must be NAME=SOURCE"):
        run("pretrain.py", monkeypatch, "--corpus", "en.txt", "--small", "--tokenizer", model)
    twice = ["--corpus", "en=en.txt"] * 2
    with pytest.raises(SystemExit, match="each with a NAME of its own"):
        run("pretrain.py", monkeypatch, *twice, "--valid", 1, "--context", 1, "--tokenizer", model)


@two_processes
@pytest.mark.parametrize("sharded", [[], ["--shard"]])
def test_pretraining_by_two_processes_equals_that_by_one(sharded, model, monkeypatch, tmp_path):
    arguments = languages(tmp_path, model)
    run("pretrain.py", monkeypatch, *arguments, "one")  # accumulates two micro-batches
    printed = torchrun(EXAMPLES / "pretrain.py", *arguments, "two", *sharded)
    assert printed.count("after de: perplexity") == 1  # by the main process
    one, two = (DiagGaussian.load(tmp_path / name / "de.safetensors") for name in ("one", "two"))
    assert not any(name.endswith(".bias") for name in one.mean)
    for name, mean in one.mean.items():
        assert mean.allclose(two.mean[name], rtol=1e-3, atol=1e-5), name
        assert one.precision[name].allclose(two.precision[name], rtol=1e-2), name


@two_processes
@pytest.mark.parametrize("lora", [[], ["--lora", 2]])
def test_sharded_finetuning_equals_that_by_one_process(lora, model, monkeypatch, tmp_path):
    """Batches of one process are made of those of two."""
    arguments = ["--model", model, *reasoning_files(tmp_path), *lora, "--max-steps", 2]
    arguments += ["--lr", 1e-3, "--valid", 4, "--output"]
    text = (EXAMPLES / "finetune.py").read_text("utf-8")
    assert "train_batch_size=batch_size" in text
    alone = text.replace("train_batch_size=batch_size", "train_batch_size=2 * batch_size")
    (tmp_path / "alone.py").write_text(alone, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["alone.py", *map(str, [*arguments, "one"])])
    runpy.run_path(str(tmp_path / "alone.py"), run_name="__main__")
    torchrun(EXAMPLES / "finetune.py", *arguments, "two", "--shard")
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    one, two = (load_file(tmp_path / name / "reasoning" / file) for name in ("one", "two"))
    assert two.keys() - one.keys() <= {"lm_head.weight"}  # tied, and written twice
    for name, value in one.items():
        assert value.allclose(two[name], rtol=1e-3, atol=1e-5), name


def test_the_scripts_are_short():
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 170, file
