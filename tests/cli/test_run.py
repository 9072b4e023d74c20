"""``covon run`` as a user calls it."""

import contextlib
import errno
import json
import os
import re
import sys
from types import SimpleNamespace

import joblib
import pytest
from miniature import pacs
from small_recipes import FEW, NETWORK, PACS, STRATEGIES, saved, short_recipe, small_recipe
from terminal import check_ctrl_c, covon, covon_when_both_are_ready, in_two_processes, refused

from covon_avalanche.cli import run
from covon_avalanche.experiment import cluster, estimate, grid
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.registry import baselines
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import RunFolder


@pytest.fixture
def arguments(tmp_path, in_this_process, undrawn):
    """A run of three strategies that takes a moment; the last one fails."""
    strategies = {name: STRATEGIES[name] for name in ("covon", "finetune")}
    strategies["bad"] = {"kind": "finetune", "lr": 1e30}
    recipe = small_recipe(strategies, epochs=1, train_mb_size=64, stream=FEW, seeds=[0])
    return ["run", saved(recipe, tmp_path), "--jobs", "1", "--out", tmp_path / "out"]


def write_to_a_full_disk(path, _):
    raise OSError(errno.ENOSPC, "no space", str(path))


def test_a_run_prints_the_table_and_stores_everything_but_what_failed(
    arguments, tmp_path, caplog, monkeypatch
):
    done = covon(*arguments, status=1)
    out = tmp_path / "out"
    assert "covon, seed 0: A_T" in done.stdout
    for heading in ("A_T %", "mean A_t %", "BWT %", "max forgetting %"):
        assert heading in done.stdout
    assert "A_T pooled %" not in done.stdout  # the same as A_T for domains of one size
    (log,) = (out / "bad").rglob("log.txt")
    assert done.stderr.startswith("covon: bad, seed 0: FloatingPointError: the loss is")
    assert "in domain 1, epoch 1" in done.stderr
    assert done.stderr.rstrip().endswith(f"; see {log}")
    assert "Traceback" not in done.stderr
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert "covon" in (out / "table.md").read_text(encoding="utf-8")
    for strategy in ("covon", "finetune"):
        (folder,) = (out / strategy).glob("seed-0-*")
        text = (folder / "log.txt").read_text(encoding="utf-8")
        assert [text.count(f"domain {n}, epoch 1: loss ") for n in (1, 2)] == [1, 1]
        assert text.count("hess_at_start") == (2 if strategy == "covon" else 0)
    written = {p: p.stat().st_mtime_ns for p in out.rglob("result.json")}
    assert len(written) == 2

    # A damaged result is named, and the others are in the table.
    (result,) = (out / "covon").rglob("result.json")
    whole = result.read_text(encoding="utf-8")
    result.write_text(whole[:99], encoding="utf-8")
    damaged = covon(*arguments, "--strategies", "covon,finetune", status=2)
    says = f"covon: covon, seed 0: {result} is not a result: .*; remove it to run it again"
    assert re.match(says, damaged.stderr)
    assert f"{result} is not a result" in caplog.text
    planned = covon(*arguments, "--dry-run", status=2)
    assert planned.stderr.count(f"{result} is not a result") == 1
    table, *_ = (out / "table.md").read_text(encoding="utf-8").split("\n\n")
    assert [row.split()[1] for row in table.splitlines()[2:]] == ["**finetune**"]
    result.write_text(whole, encoding="utf-8")
    os.utime(result, ns=(written[result],) * 2)

    # The same command again has nothing to do; other names hold for runs that are there, too.
    arguments += ["--strategies", "covon,finetune"]
    with monkeypatch.context() as full_disk:
        full_disk.setattr(run, "write_atomically", write_to_a_full_disk)
        done = covon(*arguments, status=2)
    assert "mean A_t %" in done.stdout
    assert done.stderr == f"covon: cannot read or write {out / 'table.md'}: no space\n"
    again = covon(*arguments)
    assert "covon, seed 0: A_T" in again.stdout
    assert again.stderr == ""
    assert written == {p: p.stat().st_mtime_ns for p in out.rglob("result.json")}
    names = ["--set", "name=mine", "--set", "title=A [/b] of [pilot]"]
    done = covon(*arguments, *names)
    assert "A [/b] of [pilot]: 2 runs" in done.stdout
    table, *_ = (out / "table.md").read_text(encoding="utf-8").split("\n\n")
    assert len(table.splitlines()) == 4
    results = [Result.load(path) for path in out.rglob("result.json")]
    assert {(r.recipe, r.settings["title"]) for r in results} == {("mine", "A [/b] of [pilot]")}


def test_a_run_of_another_process_is_waited_for_and_resumed(arguments, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "out", load_recipe(arguments[1]), "covon", 0)
    with contextlib.ExitStack() as another:
        another.enter_context(folder.opened())
        monkeypatch.setattr(grid, "time", SimpleNamespace(sleep=lambda _: another.close()))
        done = covon(*arguments, "--strategies", "covon,finetune", "--seeds", "0")
    steps = re.findall(r"(?m)^(\w+), seed 0: (another process is running it$|A_T)", done.stdout)
    waits = ("covon", "another process is running it")
    assert steps == [waits, ("finetune", "A_T"), ("covon", "A_T")]


def test_two_machines_share_the_runs_of_a_folder(arguments, tmp_path):
    """As two processes; none of the runs is repeated, and both print all of them."""
    command = [*arguments, "--strategies", "covon,finetune", "--seeds", "0-1"]
    in_two_processes(covon_when_both_are_ready, command, str(tmp_path))
    own = []
    for rank in range(2):
        printed = (tmp_path / f"printed-{rank}.txt").read_text(encoding="utf-8")
        assert "4 result.json files" in printed
        ended = re.findall(r"(?m)^(\w+, seed \d): A_T .* s( \(cached\))?$", printed)
        assert len({run for run, _ in ended}) == len(ended) == 4
        own += [run for run, cached in ended if not cached]
    assert len({*own}) == 4  # one that ends just when the other process takes it is in both
    assert (tmp_path / "out/accuracy.png").stat().st_size > 10_000
    files = [*(tmp_path / "out").rglob("run.json")]
    assert [json.loads(file.read_text(encoding="utf-8"))["starts"] for file in files] == [1] * 4


def test_a_dry_run_says_what_would_run_and_for_how_long(arguments, tmp_path, monkeypatch):
    repeated = ["--strategies", "covon", "--strategies", "finetune", "--seeds", "0", "--seeds", "1"]
    command = [*arguments, *repeated, "--dry-run"]
    first = covon(*command)
    assert first.stdout.splitlines()[0].endswith("4 runs, 0 finished, 4 to run, 1 in parallel")
    assert "The data are there." in first.stdout
    for name in ("covon", "finetune"):
        says = rf"(?m)^{name}: 2 x 0:00:\d\d of training, from timed batches of one process$"
        assert re.search(says, first.stdout)
    assert not (tmp_path / "out").exists()
    covon(*arguments, "--strategies", "finetune")
    (file,) = (tmp_path / "out").rglob("result.json")
    Result.load(file).model_copy(update={"train_seconds": [40.0, 60.0]}).save(file)
    monkeypatch.setattr(estimate, "estimated_seconds", lambda *_: estimate.Estimate(7.0, 3.0))
    monkeypatch.setattr(estimate, "evaluation_seconds", lambda *_: 20.0)
    lines = covon(*command).stdout.splitlines()
    assert lines[0].endswith("4 runs, 1 finished, 3 to run, 1 in parallel")
    assert lines[1:-1] == [
        "Timing batches of strategies without stored results ...",
        "The data are there.",
        "covon: 2 x 0:00:10 of training, from timed batches of one process",
        "finetune: 1 x 0:01:40 of training, from stored results",
    ]
    assert re.fullmatch(r"In total about 0:03:0\d, with start-up and evaluations", lines[-1])
    lines = covon(*command, "--jobs", "2").stdout.splitlines()  # two of 30 s; one of 120 s follows
    assert re.fullmatch(r"In total about 0:02:3\d, with start-up and evaluations", lines[-1])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("device=cuda", 'device = "cuda": this machine has 0 cuda devices'),
        ("train_mb_size=500", "is more than the 200 training images of domain 1"),
        ("strategies.finetune.lr=1e300", "finetune: FloatingPointError: the loss is"),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_runs(arguments, setting, sentence):
    more = ["--strategies", "finetune", "--dry-run", "--set", setting]
    done = covon(*arguments, *more, status=2)
    assert "The data are there." not in done.stdout
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_a_dry_run_names_the_strategy_whose_class_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    broken = OWN_PLUGIN.replace("strategy.loss *= 1.0", 'raise KeyError("no such thing")')
    (tmp_path / "broken_plugin.py").write_text(broken, encoding="utf-8")
    mine = STRATEGIES["custom"] | {"implementation": "broken_plugin:Scaled"}
    saved(small_recipe({"mine": mine}, epochs=1, stream=FEW), tmp_path)
    assert refused("run", "tiny.toml", "--dry-run") == "covon: mine: KeyError: 'no such thing'"


@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_incomplete_data_are_reported_by_a_dry_run_and_once_for_all_runs(tmp_path):
    pacs(tmp_path / "PACS")
    images = {"stream": PACS | {"limit": 2}, "model": NETWORK, "train_mb_size": 2}
    recipe = short_recipe("finetune", **images, epochs=1, seeds=[0, 1])
    command = ["run", saved(recipe, tmp_path), "--out", tmp_path / "out", "--jobs", 1]
    counts = {"sketch": 3929, "photo": 1670}
    for more in (["--dry-run"], [], []):  # the last finds finished runs
        done = covon(*command, "--dataset-root", tmp_path, *more)
        assert done.stderr.splitlines() == [
            f"warning: PACS's {name} should have {n} images, found 70" for name, n in counts.items()
        ]
    for log in (tmp_path / "out").rglob("log.txt"):
        assert log.read_text(encoding="utf-8").count("should have") == 2


def test_before_it_starts_a_run_says_what_differs_and_what_has_no_bundle(arguments):
    arguments += ["--strategies", "finetune"]
    covon(*arguments)
    says = "1 run finished without --bundle, so no model was saved: to train again, "
    done = covon(*arguments, "--bundle", "--set", "workers=1")
    assert done.stdout.startswith(says)
    assert "finetune, seed 0: A_T" in done.stdout
    assert "(cached)" in done.stdout
    done = covon(*arguments, "--dry-run", "--epochs", "3")
    assert done.stdout.startswith("1 finished run of finetune differs in epochs: 1, now 3\n")


def test_the_data_and_devices_of_a_cluster_may_be_elsewhere(arguments):
    words = [word for word in arguments if word not in ("--jobs", "1")]
    done = covon(*words, "--dry-run", "--launcher", "slurm", "--set", "device=cuda")
    assert 'No estimates: device = "cuda": this machine has 0 cuda devices' in done.stdout


def tree(folder):
    """All paths below a folder, with the content of files."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_a_dry_run_and_the_status_change_no_byte(arguments, tmp_path):
    arguments += ["--strategies", "covon,finetune", "--seeds", "0-1"]
    covon(*arguments)
    damaged, interrupted, *_ = sorted((tmp_path / "out").rglob("result.json"))
    interrupted.unlink()
    (interrupted.parent / ".lock").unlink()
    before = tree(tmp_path)
    done = covon(*arguments, "--dry-run", "--set", "title=Another", "--set", "name=another")
    assert "Another: 4 runs, 3 finished, 1 to run" in done.stdout
    for command in ("status", "show"):
        assert "3 finished, 1 interrupted" in covon(command, tmp_path / "out").stdout
    assert tree(tmp_path) == before
    damaged.write_text("{")
    covon(*arguments, "--dry-run", status=2)
    assert tree(tmp_path) == before | {damaged: b"{"}


def test_only_missing_runs_are_submitted_to_a_cluster(arguments, monkeypatch):
    submitted = []

    def submit(folders, *_, **__):
        submitted.append([(folder.strategy, folder.seed) for folder in folders])
        return [str(i) for i in range(len(folders))]

    monkeypatch.setattr(cluster, "submit", submit)
    command = [*arguments, "--strategies", "finetune", "--seeds"]
    covon(*command, "0")
    on_cluster = [word for word in command if word not in ("--jobs", "1")]
    covon(*on_cluster, "0-1", "--launcher", "slurm")
    assert submitted == [[("finetune", 1)]]
    done = covon(*on_cluster, "0", "--launcher", "slurm")
    assert done.stdout.endswith(": all runs are finished\n")
    assert len(submitted) == 1


OWN_PLUGIN = """
from avalanche.training.plugins import SupervisedPlugin


class Scaled(SupervisedPlugin):
    def before_backward(self, strategy, **kwargs):
        strategy.loss *= 1.0
"""


@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_a_changed_class_is_another_run_and_a_subset_keeps_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = STRATEGIES["custom"] | {"implementation": "scaled_plugin:Scaled", "optimizer": "sgd"}
    strategies = {"finetune": STRATEGIES["finetune"], "mine": own}
    saved(small_recipe(strategies, epochs=1, stream=FEW, seeds=[0]), tmp_path)
    (tmp_path / "scaled_plugin.py").write_text(OWN_PLUGIN, encoding="utf-8")
    command = ["run", "tiny.toml", "--jobs", "1", "--out", "out"]
    covon(*command)
    table = (tmp_path / "out/table.md").read_text(encoding="utf-8")

    again = covon(*command, "--strategies", "mine")
    assert "mine, seed 0: A_T" in again.stdout
    assert "1 run, 1 finished, 0 to run" in again.stdout
    assert (tmp_path / "out/table.md").read_text(encoding="utf-8") == table

    (tmp_path / "scaled_plugin.py").write_text(OWN_PLUGIN.replace("1.0", "9.00"), encoding="utf-8")
    del sys.modules["scaled_plugin"]  # another process would import it anew
    monkeypatch.setattr(baselines, "_imported", {})
    changed = covon(*command, "--strategies", "mine")
    assert "1 run, 0 finished, 1 to run" in changed.stdout
    files = sorted((tmp_path / "out/mine").rglob("result.json"), key=lambda p: p.stat().st_mtime_ns)
    old, new = map(Result.load, files)
    assert old.epochs[0].loss != new.epochs[0].loss
    sources = [result.settings["strategy"]["source"] for result in (old, new)]
    assert sources[0] != sources[1]
    covon(*command, "--strategies", "mine", "--seeds", "1")
    assert "same seeds" in (tmp_path / "out/table.md").read_text(encoding="utf-8")

    # A recipe of the first runs, such as a report's, does not run with another file or without it.
    of_the_first = f'strategies.mine.source="{sources[0]}"'
    for found in (f"'{sources[1]}'", "'no file'"):
        says = f"(source = '{sources[0]}', now {found}): restore that version"
        assert says in refused(*command, "--set", of_the_first, "--set", "epochs=2")
        (tmp_path / "scaled_plugin.py").unlink(missing_ok=True)
        monkeypatch.setattr(baselines, "_imported", {})


def test_ctrl_c_leaves_whole_files_and_no_process_behind(tmp_path):
    command = [sys.executable, "-m", "covon_avalanche", "run", "permuted-digits", "--jobs", "1"]
    command += ["--out", str(tmp_path), "--seeds", "0-9", "--strategies", "finetune,covon"]
    command += ["--epochs", "2", "--set", "stream.n_experiences=2"]
    check_ctrl_c(command, lambda: list(tmp_path.rglob("result.json")), times=2)
    files = list(tmp_path.rglob("result.json"))
    assert 1 <= len(files) < 20
    assert all(p.read_text().endswith("}\n") for p in files)


@pytest.mark.parametrize(
    ("device", "jobs", "expected"), [("cpu", (), 6), ("cuda:1", (), 1), ("cuda", ("--jobs", 2), 2)]
)
def test_how_many_runs_are_parallel(device, jobs, expected, tmp_path, monkeypatch):
    """One per core, but one on a GPU, unless it is said."""
    asked = []

    def fake(*arguments, processes, **options):
        asked.append(processes)
        return []

    def no_pool(workers, *_, **__):
        asked.append(workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(joblib, "cpu_count", lambda: 6)
    monkeypatch.setattr(run, "run_grid", fake)
    monkeypatch.setattr(grid, "WorkerPool", no_pool)
    given = ["--set", f'device="{device}"', "--out", str(tmp_path), *jobs]
    covon("run", *given)
    covon("search", "permuted-digits", "--validation-size", 0.2, *given, status=130)
    assert asked == [expected, expected]
