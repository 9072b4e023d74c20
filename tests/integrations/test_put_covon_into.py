"""Scripts with the diffs of docs/how-to/put-covon-into.md train as a plain loop, bit by bit."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from timm.optim import param_groups_weight_decay
from torch import nn
from toy_optimizers import accumulate, same, weights
from toys import make_naive

from covon_avalanche import CoVON, CoVONStrategy, presets
from covon_avalanche.streams import PermutedDigits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/put-covon-into.md").read_text("utf-8")
SCRIPTS = ROOT / "tests/scripts"
DIFF = re.compile(r"^<!-- diff: (\S+) -->\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.filterwarnings("ignore")


def apply(diff: str, text: str) -> str:
    """A script after a diff, whose hunks are separated by ``@@`` and have no line numbers."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Writes a script after its diff, and runs it with these arguments; what it defines."""
    monkeypatch.chdir(tmp_path)
    for name, diff in DIFF.findall(PAGE):
        text = apply(diff, (SCRIPTS / name).read_text("utf-8"))
        (tmp_path / name).write_text(text, encoding="utf-8")

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return runpy.run_path(name, run_name="__main__")

    return run


def test_every_script_has_a_diff():
    names = {name for name, _ in DIFF.findall(PAGE)}
    assert names == {path.name for path in SCRIPTS.iterdir() if path.is_file()}


def nanogpt_task(model, optimizer, task):
    """A task of the script, in a loop of one's own."""
    text = (SCRIPTS / "nanogpt_train.py").read_text("utf-8")
    head, _, _ = text.partition("# optimizer\n")
    names = {"__name__": "head"}
    head = head.replace('os.environ.get("TEXT", "0")', f'"{task}"')
    exec(head.replace('os.environ.get("INIT_FROM", "scratch")', '"scratch"'), names)
    model = model or names["model"]
    generator = torch.Generator().manual_seed(0)
    settings = dict(lr=6e-3, batch_size=8, generator=generator)
    optimizer = optimizer or CoVON(model.named_parameters(), **settings)
    batch = names["get_batch"]("train")
    for i in range(6):
        optimizer.param_groups[0]["lr"] = 6e-3 * min(1, (i + 1) / 3)
        if i % 2 == 0:
            for _ in range(2):
                names["get_batch"]("val")
        with optimizer.sampled_params():
            optimizer.zero_grad()
            for _ in range(2):
                (model(*batch)[1] / 2).backward()
                batch = names["get_batch"]("train")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.consolidate()
    return model, optimizer


@pytest.mark.parametrize("compiled", [False, True])
def test_nanogpt(compiled, patched, monkeypatch, tmp_path):
    monkeypatch.setenv("OUT_DIR", str(tmp_path))
    if compiled:
        monkeypatch.setenv("COMPILE", "1")
    first = patched("nanogpt_train.py")
    monkeypatch.setenv("INIT_FROM", "resume")
    monkeypatch.setenv("TEXT", "1")
    second = patched("nanogpt_train.py")
    model = optimizer = None
    for task, names in enumerate((first, second)):
        model, optimizer = nanogpt_task(model, optimizer, task)
        trained = names["raw_model"]
        assert same(weights(getattr(trained, "_orig_mod", trained)), weights(model))
        precision = names["optimizer"].posterior().precision
        own = optimizer.posterior().precision
        assert same(precision, own)


@pytest.mark.parametrize("amp", [[], ["--amp"]])
def test_timm(amp, patched, tmp_path):
    own = runpy.run_path(str(SCRIPTS / "timm_train.py"))
    model = own["make_task"]().get_trainable_module()
    groups, noise = param_groups_weight_decay(model, 0.0), torch.Generator().manual_seed(0)
    optimizer = CoVON.finetuning(groups, lr=1e-3, generator=noise)
    settings = ["--opt", "covon", "--lr", 1e-3, "--weight-decay", 0, "--output", tmp_path, *amp]
    for task in range(2):
        resume = ["--resume", tmp_path / "recovery-2-0.pth.tar"] if task else []
        patched("timm_train.py", *settings, "--images", task, *resume)
        saved = torch.load(tmp_path / "recovery-2-0.pth.tar")
        for _ in range(2):
            accumulate(optimizer, model, own["make_loader"](task), 2, clip=1.0)
        optimizer.consolidate()
        assert same(dict(saved["state_dict"]), dict(model.state_dict()))
        state = optimizer.state_dict()["state"]
        assert all(same(saved["optimizer"]["state"][i], state[i]) for i in state)


def test_weight_decay_of_timm_is_an_error(patched, tmp_path):
    with pytest.raises(ValueError, match="replaces weight decay: leave it out"):
        patched("timm_train.py", "--opt", "covon", "--lr", 1e-3, "--output", tmp_path)


def test_lightning_cli(patched, tmp_path):
    pytest.importorskip("lightning", reason="needs the extra lightning")
    pytest.importorskip("jsonargparse", reason="Lightning's CLI needs it")
    config = ["fit", "--config", "lightning_cli.yaml"]
    first = patched("lightning_cli.py", *config)["cli"]
    (tmp_path / "config.yaml").unlink()  # Lightning does not overwrite it
    (tmp_path / "task.ckpt").rename(tmp_path / "first.ckpt")
    more = ["--ckpt_path", "first.ckpt", "--trainer.max_epochs", 4, "--data.seed", 1]
    second = patched("lightning_cli.py", *config, *more)["cli"]
    own = runpy.run_path(str(SCRIPTS / "lightning_cli.py"))
    model = own["Classifier"]()
    optimizer = CoVON(model.parameters(), lr=1e-3)
    size = own["Data"](0).train_dataloader().batch_size
    optimizer.param_groups[0]["batch_size"] = 2 * size
    (trained,) = first.trainer.optimizers
    optimizer.param_groups[0]["noise_seed"] = trained.param_groups[0]["noise_seed"]

    def loss(model, batch):
        return lambda: model.training_step(batch, 0)

    for seed, cli in enumerate((first, second)):
        batches = list(own["Data"](seed).train_dataloader()) * 2
        accumulate(optimizer, model, batches, 2, loss=loss)
        optimizer.consolidate()
        if cli is second:
            assert same(weights(cli.model), weights(model))
    assert same(second.trainer.optimizers[0].posterior().precision, optimizer.posterior().precision)


def test_the_preset_in_yaml_is_that_of_finetuning():
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block) == presets.FINETUNING


def test_avalanches_example(patched):
    model = patched("avalanche_naive.py")["model"]
    torch.manual_seed(0)
    benchmark = PermutedDigits(2)
    own = runpy.run_path(str(SCRIPTS / "avalanche_naive.py"))["SimpleMLP"](
        num_classes=10, input_size=64, hidden_size=16, drop_rate=0
    )
    optimizer = CoVON(own.named_parameters(), lr=1e-3)
    strategy = make_naive(own, optimizer, cls=CoVONStrategy, train_mb_size=32, train_epochs=1)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    assert same(weights(model), weights(own))
