"""Bad input of every sort: exit status 2, one clear sentence, and nothing is lost."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from urllib.error import URLError

import pytest
from made_up_results import made_up
from miniature import pacs
from small_recipes import FEW, NETWORK, PACS, STRATEGIES, saved, small_recipe
from terminal import covon, refused

from covon_avalanche.cli import run
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_folder import RunFolder

QUICK = pytest.mark.usefixtures("in_this_process", "undrawn")
pytestmark = [QUICK, pytest.mark.filterwarnings("ignore")]
DIGITS = {"name": "PermutedDigits", "n_experiences": 2}
HELD_OUT = {**DIGITS, "validation_size": 0.2}


def write(folder: Path, strategy: str = "finetune", **changes) -> Path:
    """A recipe file of a second's run."""
    known = {"name": "tiny", "title": "Tiny", "epochs": 1, "train_mb_size": 64, "seeds": [0]}
    return saved(small_recipe({strategy: STRATEGIES[strategy]}, **known | changes), folder)


@pytest.mark.parametrize(
    ("strategy", "old", "new", "sentence"),
    [
        # Errors in the recipe itself: all others in tests/experiment/test_recipe.py.
        ("finetune", "epochs = 1", f"x = {'[' * 9000}{']' * 9000}", "is not valid TOML: "),
        # Errors that only a run finds.
        ("finetune", "train_mb_size = 64", "train_mb_size = 5000", "than the 1437 training images"),
        ("custom", "supervised:Naive", "supervised:Nothing", "cannot be imported"),
        ("custom", "supervised:Naive", "plugins:GEMPlugin", "cannot be created: "),
    ],
)
def test_recipes(tmp_path, strategy, old, new, sentence):
    file = write(tmp_path, strategy)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert sentence in refused("run", file, "--out", tmp_path / "out", "--jobs", 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nothing"], "there is no recipe 'nothing'; known are "),
        (["run", "--strategies", "covon,ewcc"], "has no strategy 'ewcc'; known are finetune, "),
        (["run", "--seeds", "5-2"], "the range of seeds '5-2' is empty"),
        (["run", "--seeds", "9" * 5000], "seeds must look like 0-4 or 0,3,7, got '99"),
        (["run", "--seeds", "0-99999999999"], "'0-99999999999' is of more than 10000"),
        (["run", "--set", f"epochs={'9' * 5000}"], "epochs = '999"),
        (["run", "--set", f"epochs={'[' * 9000}"], "epochs = '[[["),
        (["run", "a" * 300], "cannot read or write aaa"),
        (["run", "--set", f"name={'a' * 300}"], "name = 'aaa"),
        (["search", "permuted-digits", "--validation-size", "inf"], "validation_size"),
        (["search", "permuted-digits", "--validation-size", "0"], "that are held out"),
        (["run", "--epochs", "0"], "epochs = 0: Input should be greater than or equal to 1"),
        (["search", "pacs", "--epochs", "9" * 9], "epochs = 999999999: Input should be less"),
        (["run", "--launcher", "slurm", "--slurm", "gpu"], "a setting must look like KEY=VALUE"),
        (["run", "--slurm", "partition=gpu"], "--slurm partition=gpu is for --launcher slurm only"),
        (["run", "--launcher", "slurm", "--jobs", "2"], "--jobs 2 is for runs on this machine"),
        (["run", "pacs", "--set", 'stream.domains=["gogle"]'], "sketch, got ['gogle']"),
        (["run", "--seeds", "0,0,1"], "seeds must be distinct"),
        (["show", "nothing"], "there is no recipe 'nothing'"),
        (["report", "nowhere"], "nowhere cannot be read: No such file"),
        (["report", "."], "there is no finished run in ."),
        (["compare", "nowhere", "nowhere"], "nowhere cannot be read: No such file"),
    ],
)
def test_arguments(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(*arguments)


@pytest.mark.parametrize(
    ("command", "changes", "sentence"),
    [
        ("rm -r photo", {}, "photo"),
        ("rm -r photo/dog", {}, "dog"),
        ("echo > sketch/dog/0.jpg", {}, "sketch/dog/"),
        ("true", {"model": NETWORK | {"backbone": "resnet_of_mine"}}, "resnet_of_mine"),
    ],
)
def test_data_and_weights(tmp_path, command, changes, sentence):
    subprocess.run(command, shell=True, check=True, cwd=pacs(tmp_path / "PACS"))
    recipe = write(tmp_path, **{"stream": PACS, "model": NETWORK, "train_mb_size": 2, **changes})
    options = ["--out", tmp_path / "out", "--jobs", 1, "--dataset-root", tmp_path]
    assert sentence in refused("run", recipe, *options)


@pytest.mark.parametrize(
    ("size", "backbone", "reason"),
    [
        (8, "squeezenet", "Given input size"),
        (50, "torchvision/vit_b_16", "Input shape indivisible by patch size!"),
        (50, "timm/test_vit", "Input height (50) should be divisible by patch size (16)."),
    ],
)
def test_an_image_size_that_the_network_does_not_take(tmp_path, size, backbone, reason):
    pacs(tmp_path / "PACS")
    changes = {"stream": PACS | {"image_size": size}, "model": NETWORK | {"backbone": backbone}}
    options = ["--out", tmp_path / "out", "--jobs", 1, "--dataset-root", tmp_path]
    command = ["run", write(tmp_path, train_mb_size=2, **changes), *options]
    for more in ([], ["--dry-run"]):
        says = f"image_size = {size} does not fit {backbone}: {reason}"
        assert says in refused(*command, *more)


def test_missing_data_are_named_before_any_run_starts(tmp_path):
    out, root = tmp_path / "out", tmp_path / "data"
    options = ["--out", out, "--dataset-root", root]
    recipe = write(tmp_path, stream={**PACS, "validation_size": 0.1}, model=NETWORK)
    for command in (["run"], ["run", "--dry-run"], ["search"]):
        sentence = refused(*command, recipe, *options)
        assert f"there is no {root / 'PACS'}; give the folder of all data by --data" in sentence
        assert sentence.endswith("PACS/photo/dog exists")
    sentence = refused("run", "domainnet", *options)
    assert sentence.endswith(f"`covon data download DomainNet --root {root}` fetches them")
    pacs(root / "PACS")
    weights = write(tmp_path, stream=PACS, model=NETWORK | {"weights": "mine.safetensors"})
    says = f"the weights are missing: there is no {root / 'mine.safetensors'}; give"
    for more in ([], ["--dry-run"]):
        assert says in refused("run", weights, *options, *more)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "announced", "says"),
    [
        (
            {"stream": DIGITS | {"name": "PermutedMNIST"}},
            "MNIST will be downloaded to ",
            "MNIST cannot be downloaded to ",
        ),
        (
            {"stream": PACS, "model": {**NETWORK, "weights": "default"}, "train_mb_size": 2},
            "The weights of squeezenet will be downloaded, unless they are cached.",
            "the weights of squeezenet cannot be downloaded or loaded: <urlopen error no route",
        ),
    ],
)
def test_announced_downloads_may_fail(tmp_path, monkeypatch, changes, announced, says):
    def no_route(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", no_route)
    monkeypatch.setattr("torch.hub.urlopen", no_route)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    pacs(tmp_path / "PACS")
    recipe = write(tmp_path, **changes)
    command = ["run", recipe, "--dataset-root", tmp_path, "--out", tmp_path / "out", "--jobs", 1]
    dry = covon(*command, "--dry-run")
    assert announced in dry.stdout
    assert dry.stdout.count("of training, from timed batches") == ("model" in changes)
    assert not (tmp_path / "MNIST").exists()
    assert says in refused(*command)


def test_the_home_folder_is_expanded_where_the_shell_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pacs(tmp_path / "data/PACS")
    recipe = write(tmp_path, stream=PACS | {"limit": 1}, model=NETWORK, train_mb_size=2)
    command = ["run", recipe, "--out", tmp_path / "out", "--jobs", 1]
    covon(*command, "--dataset-root=~/data")
    assert "no/data" in refused(*command, "--seeds", 1, "--dataset-root=~/no/data")


def test_submitit_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    command = ["run", write(tmp_path), "--launcher", "slurm", "--out", tmp_path / "out"]
    assert refused(*command).endswith("submitit: pip install 'covon_avalanche[cluster]'")
    assert not (tmp_path / "out").exists()


class TestResults:
    @pytest.fixture
    def file(self, tmp_path):
        result = made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]])
        (tmp_path / "result.json").write_text(result.model_dump_json())  # without a checksum
        return tmp_path / "result.json"

    def test_of_a_newer_version(self, file, tmp_path):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 99}))
        for arguments in (("report", file), ("compare", file, file)):
            assert "has schema 99, of a newer version of this package" in refused(*arguments)
        path = write(tmp_path)
        folder = RunFolder(tmp_path / "out", load_recipe(str(path)), "finetune", 0)
        folder.path.mkdir(parents=True)
        shutil.copy(file, folder.result_file)
        assert "newer version" in refused("run", path, "--out", tmp_path / "out")
        assert folder.result_file.read_bytes() == file.read_bytes()

    @pytest.mark.parametrize("text", ["", "{", "[]", 10**5 * "[", '{"schema_version":1}', "\udcff"])
    def test_that_are_none(self, file, text):
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert f"{file} is no" in refused("report", file)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"settings": {"strategy": "covon"}}, "settings.strategy.kind is missing"),
            ({"settings": {"strategy": {"kind": "a"}, "stream": 1}}, "settings.stream must be a"),
            ({"counts": [], "accuracy": [[]], "held_out": True}, "counts: List should have at lea"),
            ({"accuracy": []}, "accuracy = [] does not fit counts = [10, 10]"),
            ({"accuracy": [[0.9, 0.1], None]}, "accuracy = [[0.9, 0.1], None] does not fit "),
            ({"accuracy": [[0.9], [0.8, 0.8]]}, "accuracy = [[0.9], [0.8, 0.8]] does not fit "),
            ({"accuracy": [[0.8, 0.8]]}, "accuracy = [[0.8, 0.8]] does not fit "),
            ({"counts": [10, 0]}, "counts.1: Input should be greater than or equal to 1"),
            ({"counts": [True, 10]}, "counts.0: Input should be a valid integer"),
            ({"accuracy": [[0.9, 0.1], ["0.5", 0.5]]}, "accuracy.1.0: Input should be a valid num"),
            ({"accuracy": [[0.9, 0.1], [True, 0.5]]}, "accuracy.1.0: Input should be a valid num"),
            ({"accuracy": [[0.9, 0.1], [50.0, 0.5]]}, "accuracies must be in [0, 1], got [[0.9, "),
            ({"train_seconds": ["1", 2.0]}, "train_seconds.0: Input should be a valid number"),
            ({"calibration": {"nll": True}}, "calibration.nll: Input should be a valid number"),
            ({"seed": "3"}, "seed: Input should be a valid integer"),
        ],
    )
    def test_that_contradict_themselves(self, file, changes, sentence):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        for arguments in (("report", file), ("compare", file, file)):
            assert f"{file} is not a result: {sentence}" in refused(*arguments)

    @pytest.mark.parametrize(
        "strategy", [{"kind": "td-vcl", "n_steps": "many"}, {"kind": "covon", "cls": 1}]
    )
    def test_with_settings_that_cannot_be_read(self, file, strategy):
        settings = {"settings": {"strategy": strategy}}
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        for arguments in (("report", file), ("compare", file, file)):
            assert f"{file} has settings that cannot be read: " in refused(*arguments)

    def test_that_do_not_go_together(self, file):
        made_up("covon", 1, [[0.9]]).save(file.parent / "other/result.json")
        folder = file.parent
        assert "has 2 runs; name the folder of one" in refused("compare", folder, folder)
        again = file.parent / "again/result.json"
        made_up("covon", 1, [[0.8]], run_hash="a").save(again)
        out = file.parent / "report"
        sentence = refused("report", folder, "--out", out)
        assert f"{again} and {folder / 'other/result.json'} are results of the same run" in sentence
        assert "differ: covon with seed 1 in recipe 'r'" in sentence
        assert not out.exists()


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    made_up("covon", 0, [[0.9]]).save(tmp_path / "result.json")
    out = tmp_path / "file" / "runs"
    for arguments in (["run"], ["search", write(tmp_path, stream=HELD_OUT)]):
        sentence = refused(*arguments, "--out", out)
        assert sentence == f"covon: cannot read or write {out}: Not a directory"
    sentence = refused("report", tmp_path / "result.json", "--out", out)
    assert sentence == f"covon: cannot read or write {out}: Not a directory"
    sentence = refused("report", tmp_path / "result.json", "--out", out, "--columns", "A_T,bwt")
    assert "no column is named 'bwt'; known are A_T, difference, p, A_T pooled" in sentence
    assert sentence.endswith("; did you mean BWT?")


@pytest.mark.parametrize(
    ("command", "name"), [("run", "table.md"), ("run", "accuracy.png"), ("search", "best.toml")]
)
def test_what_cannot_be_written_at_the_end(tmp_path, command, name):
    (tmp_path / "out" / name / "in the way").mkdir(parents=True)
    recipe = write(tmp_path, stream=FEW)
    trials = ["--trials", "1"] if command == "search" else []
    sentence = refused(command, recipe, *trials, "--out", tmp_path / "out", "--jobs", 1)
    assert f"cannot read or write {tmp_path / 'out' / name}: " in sentence
    assert list((tmp_path / "out").rglob("result.json"))


@pytest.mark.parametrize("base", ["Exception", "SystemExit"])
def test_a_search_says_what_an_own_class_raised(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising.py").write_text(f"class Mine({base}): ...\nraise Mine('no such luck')\n")
    own = STRATEGIES["custom"] | {"implementation": "raising:Naive"}
    recipe = small_recipe({"mine": own}, epochs=1, stream=HELD_OUT)
    done = covon("search", saved(recipe, tmp_path), "--out", tmp_path, "--jobs", 1, status=1)
    (line,) = done.stderr.splitlines()
    says = "covon: mine, trial 1 (lr 0.01) (and 4 other runs): Mine: no such luck; see "
    assert line.startswith(says)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (RecursionError("too deep"), 1, "RecursionError: too deep; see "),
        (MemoryError(), 1, "MemoryError: no reason given; see "),
        (OverflowError("a\x1b[31m\nb"), 1, "OverflowError: a [31m b; see "),
        (OSError(28, "No space left", "log.txt"), 2, "cannot read or write log.txt: "),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_anything_else_is_one_sentence_and_a_log(tmp_path, monkeypatch, error, status, sentence):
    def fail(*_):
        raise error

    monkeypatch.setattr("covon_avalanche.cli.run.run_folders", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    done = covon("run", write(tmp_path), "--out", tmp_path / "out", status=status)
    signal.signal(signal.SIGINT, before)
    assert done.stderr.startswith(f"covon: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    logs = list(tmp_path.glob("covon-*.log"))
    assert len(logs) == (status == 1)
    assert all("Traceback" in log.read_text() and str(log) in done.stderr for log in logs)
