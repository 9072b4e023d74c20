"""Bad input of every sort: exit status 2, one clear sentence, and nothing is lost."""

import json
import shutil
from pathlib import Path

import pytest
from made_up_results import made_up
from miniature import pacs
from small_recipes import STRATEGIES
from typer.testing import CliRunner

from covon_avalanche.cli import app
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.recipe_text import recipe_text
from covon_avalanche.experiment.run_folder import RunFolder

pytestmark = [
    pytest.mark.usefixtures("in_this_process"),
    pytest.mark.filterwarnings("ignore"),
]
DIGITS = {"name": "PermutedDigits", "n_experiences": 2}
PACS = {"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32}
NETWORK = {"backbone": "squeezenet", "weights": ""}


def write(folder: Path, *, strategy: str = "finetune", text=lambda t: t, **changes) -> str:
    """A recipe file of a second's run; ``text`` may spoil it."""
    data = {
        "name": "tiny",
        "title": "Tiny",
        "epochs": 1,
        "train_mb_size": 64,
        "final_lr_factor": 0.5,
        "seeds": [0],
        "stream": DIGITS,
        "model": {"hidden_size": 8, "hidden_layers": 1},
        "strategies": {strategy: STRATEGIES[strategy]},
    }
    file = folder / "tiny.toml"
    file.write_text(text(recipe_text(Recipe.model_validate(data | changes), {})), encoding="utf-8")
    return str(file)


def replaced(old: str, new: str):
    """Spoil a recipe; the old text must be there."""

    def replace(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return replace


def refused(*arguments: str) -> str:
    """The sentence of a command that is refused."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert "Traceback" not in done.output
    sentence = done.stderr.strip()
    if "Usage:" not in sentence:  # typer's own errors come in a box
        assert len(sentence.splitlines()) == 1, sentence
        assert sentence.startswith("covon: ")
    return sentence


@pytest.mark.parametrize(
    ("strategy", "old", "new", "sentence"),
    [
        # Errors in the recipe itself: more of them in tests/experiment/test_recipe.py.
        ("finetune", "lr = 0.01", "lr = nan", "strategies.finetune.lr = nan: "),
        ("finetune", 'title = "Tiny"', 'title = "Tiny', "is not valid TOML"),
        ("finetune", 'name = "tiny"', 'name = "../tiny"', "name = '../tiny': "),
        # Errors that only a run finds.
        ("finetune", "train_mb_size = 64", "train_mb_size = 5000", "than the 1437 training images"),
        (
            "finetune",
            "n_experiences = 2",
            "n_experiences = 2\nvalidation_size = 1437",
            "validation",
        ),
        ("finetune", "epochs = 1", 'epochs = 1\ndevice = "cuda:99"', "this machine has "),
        ("custom", "supervised:Naive", "supervised:Nothing", "cannot be imported"),
        ("custom", "avalanche.training.supervised:Naive", "nowhere:Naive", "cannot be imported"),
        ("custom", "avalanche.training.supervised:Naive", "json:JSONDecoder", "must be a subclass"),
        ("custom", "supervised:Naive", "plugins:GEMPlugin", "cannot be created: "),
    ],
)
def test_recipes(tmp_path, strategy, old, new, sentence):
    recipe = write(tmp_path, strategy=strategy, text=replaced(old, new))
    assert sentence in refused("run", recipe, "--out", str(tmp_path / "out"), "--jobs", "1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nothing"], "there is no recipe 'nothing'; known are "),
        (["run", "nowhere.toml"], "cannot be read: No such file"),
        (["run", "--strategies", "covon,ewcc"], "has no strategy 'ewcc'; known are finetune, "),
        (["run", "--seeds", "x"], "seeds must look like 0-4 or 0,3,7, got 'x'"),
        (["run", "--seeds", "5-2"], "the range of seeds '5-2' is empty"),
        (["run", "--epochs", "0"], "equal to 1"),
        (["run", "--jobs", "0"], "equal to 1"),
        (["run", "--set", "epochs"], "a setting must look like KEY=VALUE, got 'epochs'"),
        (["run", "--set", "epoch=3"], "epoch: unknown key"),
        (["run", "--set", "epochs.x=3"], "epochs.x: epochs is a value, not a table"),
        (["run", "--set", "strategies.covon.lr=0"], "strategies.covon.lr = 0: "),
        (["run", "core50", "domainnet", "--out", "x"], "--out is for one recipe"),
        (["run", "--launcher", "slurm", "--slurm", "gpu"], "a setting must look like KEY=VALUE"),
        (["run", "--slurm", "partition=gpu"], "--slurm partition=gpu is for --launcher slurm only"),
        (["run", "--launcher", "slurm", "--jobs", "2"], "--jobs 2 is for runs on this machine"),
        (["show", "nothing"], "there is no recipe 'nothing'"),
        (["report", "nowhere"], "nowhere cannot be read: No such file"),
        (["report", "."], "there is no finished run in ."),
        (["compare", "nowhere", "nowhere"], "nowhere cannot be read: No such file"),
        (["search", "permuted-digits", "--trials", "0"], "equal to 1"),
        (["search", "permuted-digits"], "holds out no validation images"),
        (["search", "permuted-digits", "--set", "search.covno={}"], "no strategy 'covno'; known"),
        (["data", "verify", "Nothing", "--root", "."], "Nothing"),
    ],
)
def test_arguments(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(*arguments)


class TestData:
    @pytest.fixture
    def root(self, tmp_path):
        pacs(tmp_path / "data/PACS")
        return tmp_path / "data"

    def refused(self, root, **changes):
        recipe = write(
            root.parent, **({"stream": PACS, "model": NETWORK, "train_mb_size": 2} | changes)
        )
        arguments = ["--out", str(root.parent / "out"), "--jobs", "1"]
        return refused("run", recipe, *arguments, "--dataset-root", str(root))

    def test_a_missing_folder(self, root):
        shutil.rmtree(root)
        assert "PACS" in self.refused(root)

    def test_a_missing_domain(self, root):
        shutil.rmtree(root / "PACS/photo")
        assert "photo" in self.refused(root)

    def test_an_empty_domain(self, root):
        for file in (root / "PACS/photo").rglob("*.*"):
            file.unlink()
        assert "photo" in self.refused(root)

    def test_a_missing_class(self, root):
        shutil.rmtree(root / "PACS/photo/dog")
        assert "dog" in self.refused(root)

    def test_an_unknown_domain(self, root):
        assert "'drawing'" in self.refused(root, stream={**PACS, "domains": ["sketch", "drawing"]})

    def test_a_damaged_image(self, root):
        file = next((root / "PACS/sketch/dog").iterdir())
        file.write_bytes(file.read_bytes()[:40])
        assert file.name in self.refused(root)

    def test_weights_that_are_not_there(self, root):
        model = {"backbone": "squeezenet", "weights": "mine.safetensors"}
        assert "mine.safetensors" in self.refused(root, model=model)

    def test_weights_of_another_network(self, root):
        import torch
        from safetensors.torch import save_file

        save_file({"layer.weight": torch.zeros(2)}, root / "mine.safetensors")
        model = {"backbone": "squeezenet", "weights": "mine.safetensors"}
        assert "layer.weight" in self.refused(root, model=model)

    def test_an_unknown_backbone(self, root):
        model = {"backbone": "resnet_of_mine", "weights": ""}
        assert "resnet_of_mine" in self.refused(root, model=model)


class TestResults:
    @pytest.fixture
    def file(self, tmp_path):
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]]).save(tmp_path / "result.json")
        return tmp_path / "result.json"

    def test_of_a_newer_version(self, file):
        data = json.loads(file.read_text()) | {"schema_version": 99}
        file.write_text(json.dumps(data))
        for arguments in (("report", str(file)), ("compare", str(file), str(file))):
            assert "has schema 99, of a newer version of this package" in refused(*arguments)

    def test_of_a_newer_version_in_a_run(self, file, tmp_path):
        path = write(tmp_path)
        from covon_avalanche.experiment.recipe import load_recipe

        folder = RunFolder(tmp_path / "out", load_recipe(path), "finetune", 0)
        folder.path.mkdir(parents=True)
        shutil.copy(file, folder.result_file)
        before = folder.result_file.read_text().replace(
            '"schema_version": 2', '"schema_version": 99'
        )
        folder.result_file.write_text(before)
        assert "newer version" in refused("run", path, "--out", str(tmp_path / "out"))
        assert folder.result_file.read_text() == before

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', "\udcff"])
    def test_that_are_none(self, file, text):
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert f"{file} is not a result: " in refused("report", str(file))

    def test_a_folder_of_several(self, file):
        made_up("covon", 1, [[0.9]]).save(file.parent / "other/result.json")
        folder = str(file.parent)
        assert "has 2 runs; name the folder of one" in refused("compare", folder, folder)


def test_no_permission(tmp_path):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "runs")
    assert "cannot be made" in refused("run", "--out", out)
    assert "cannot be made" in refused("search", "permuted-digits", "--out", out)
    made_up("covon", 0, [[0.9]]).save(tmp_path / "result.json")
    assert "cannot be written" in refused("report", str(tmp_path / "result.json"), "--out", out)


@pytest.mark.parametrize("name", ["table.md", "accuracy.png"])
def test_a_table_or_plot_that_cannot_be_written(tmp_path, name):
    (tmp_path / "out" / name / "in the way").mkdir(parents=True)
    arguments = ["run", write(tmp_path), "--out", str(tmp_path / "out"), "--jobs", "1"]
    sentence = refused(*arguments)
    assert f"table.md and accuracy.png cannot be written to {tmp_path / 'out'}: " in sentence
    assert list((tmp_path / "out").rglob("result.json"))


def test_a_best_recipe_that_cannot_be_written(tmp_path):
    (tmp_path / "best.toml" / "in the way").mkdir(parents=True)
    arguments = ["search", write(tmp_path), "--out", str(tmp_path), "--trials", "1"]
    sentence = refused(*arguments, "--validation-size", "0.2", "--jobs", "1")
    assert f"best.toml cannot be written to {tmp_path}: " in sentence


def test_what_is_finished_stays_when_another_run_is_refused(tmp_path):
    out = str(tmp_path / "out")
    good = CliRunner().invoke(app, ["run", write(tmp_path), "--out", out, "--jobs", "1"])
    assert good.exit_code == 0, good.output
    (result,) = (tmp_path / "out").rglob("result.json")
    before = result.read_bytes()
    spoilt = write(tmp_path, text=replaced("train_mb_size = 64", "train_mb_size = 5000"))
    refused("run", spoilt, "--out", out)
    assert result.read_bytes() == before


@pytest.mark.parametrize("base", ["Exception", "SystemExit"])
def test_a_search_tells_at_once_what_an_own_class_raised(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising.py").write_text(f"class Mine({base}): ...\nraise Mine('no such luck')\n")
    text = replaced("avalanche.training.supervised:Naive", "raising:Naive")
    arguments = ["search", write(tmp_path, strategy="custom", text=text), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--validation-size", "0.2", "--jobs", "1"])
    assert done.exit_code == 1, done.output
    assert done.stderr.splitlines() == ["covon: Mine: no such luck"]


def test_recipes_that_would_share_a_folder_are_refused(tmp_path):
    recipe = write(tmp_path)
    assert "need different names" in refused("run", recipe, recipe)
