"""The covon command, as a user meets it: in processes of its own."""

import contextlib
import json
import os
import signal
import sys
import time

import psutil
import pytest
from terminal import in_a_terminal
from typer.testing import CliRunner

from covon_avalanche import __version__, cli, cli_search, cores
from covon_avalanche.cli import app
from covon_avalanche.experiment.recipe import load_recipe, parse_seeds
from covon_avalanche.report import comparisons, load_results


def covon(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_short_run_prints_the_table_and_stores_everything(tmp_path):
    arguments = ["--epochs", "1", "--seeds", "0", "--strategies", "covon,finetune"]
    done = covon("run", *arguments, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "covon, seed 0: A_T" in done.stdout
    assert "A_T %" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 10_000
    assert "covon" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    for strategy in ("covon", "finetune"):
        (folder,) = (tmp_path / "out" / strategy).glob("seed-0-*")
        files = {p.name for p in folder.iterdir() if p.is_file()}
        assert files == {".lock", "log.txt", "metrics.jsonl", "result.json", "run.json"}
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["experience"] for line in lines] == [0, 1, 2, 3, 4]
        log = (folder / "log.txt").read_text(encoding="utf-8")
        assert log.count("hess_signal_to_noise") == (5 if strategy == "covon" else 0)
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("result.json")}
    again = covon("run", *arguments, "--out", str(tmp_path / "out"))
    assert again.exit_code == 0
    assert "covon, seed 0: A_T" in again.stdout
    assert written == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("result.json")}


def test_names_of_today_hold_for_runs_that_are_taken_over(tmp_path):
    arguments = ["--epochs", "1", "--seeds", "0", "--out", str(tmp_path)]
    assert covon("run", *arguments, "--strategies", "finetune").exit_code == 0
    names = ["--set", "name=mine", "--set", "title=A [/b] of [pilot]"]
    done = covon("run", *arguments, "--strategies", "finetune,ewc-star", *names)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("A [/b] of [pilot]") == 2  # at the start and above the table
    assert len((tmp_path / "table.md").read_text(encoding="utf-8").splitlines()) == 4
    runs = load_results(tmp_path)
    assert len(comparisons(runs)) == 1  # for `covon report`, too
    assert set(zip(runs["recipe"], runs["title"], strict=True)) == {("mine", "A [/b] of [pilot]")}


def group_members(group: int) -> list[str]:
    """Commands of the living processes of a process group (zombies do not live)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def test_a_run_that_fails_is_named_and_the_table_shows_the_rest(tmp_path):
    recipe = (
        load_recipe("permuted-digits")
        .model_copy(update={"epochs": 1})
        .model_dump(include={"name", "title", "epochs", "train_mb_size", "final_lr_factor"})
    )
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe.items()]
    lines += ["seeds = [0]", "[stream]", 'name = "PermutedDigits"', "n_experiences = 2"]
    lines += ["[model]", "hidden_size = 8", "hidden_layers = 1"]
    lines += ["[strategies.good]", 'kind = "finetune"', "lr = 0.01"]
    lines += ["[strategies.bad]", 'kind = "covon"', "lr = 1e30", "ess = 100.0", "gamma = 1.0"]
    lines += ["hess_init = 0.1", "later_hess_init = 0.1", "beta2 = 0.9", "clip_radius = 1e30"]
    (tmp_path / "recipe.toml").write_text("\n".join(lines), encoding="utf-8")
    done = covon("run", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert done.stderr.startswith("covon: bad, seed 0: FloatingPointError: ")
    (log,) = (tmp_path / "out" / "bad").rglob("log.txt")
    assert done.stderr.rstrip().endswith(f"; see {log}")
    assert "Traceback" not in done.stderr
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert "good" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


def test_ctrl_c_leaves_whole_files_and_no_process_behind(tmp_path):
    command = [sys.executable, "-m", "covon_avalanche", "run", "--out", str(tmp_path)]
    command += ["--jobs", "2", "--strategies", "finetune,covon", "--seeds", "0-9"]
    with in_a_terminal(command) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.rglob("result.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Interrupted; the same command goes on from here." in output
    assert "Traceback" not in errors
    results = list(tmp_path.rglob("result.json"))
    assert 1 <= len(results) < 20
    assert all(p.read_text().endswith("}\n") for p in results)
    assert not list(tmp_path.rglob("*.part"))
    deadline = time.monotonic() + 20
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_members(process.pid)


def test_ctrl_c_stops_all_recipes(tmp_path, monkeypatch):
    begun = []

    def interrupted(recipe, *_, **__):
        begun.append(recipe.name)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_grid", interrupted)
    done = covon("run", "permuted-digits", "permuted-mnist-hard", "--seeds", "0")
    assert done.exit_code == 130
    assert begun == ["permuted-digits"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no recipe 'nothing'; known are cddb-hard, core50, "),
        (["--strategies", "covon,ewcc"], "has no strategy 'ewcc'; known are finetune, ewc,"),
        (["--seeds", "x"], "seeds must look like 0-4 or 0,3,7, got 'x'"),
        (["--seeds", "5-2"], "the range of seeds '5-2' is empty"),
    ],
)
def test_bad_input_gets_one_sentence_and_status_2(arguments, sentence):
    result = covon("run", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_said_before_any_run(tmp_path):
    (tmp_path / "file").write_text("")
    result = covon("run", "--out", str(tmp_path / "file" / "runs"))
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr


def test_help_version_and_recipes():
    assert "Compare continual-learning strategies" in covon("run", "--help").stdout
    assert covon("--version").stdout.strip() == __version__
    assert "\npermuted-digits: Permuted digits" in covon("recipes").stdout


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("run", ["permuted-digits", "runs/RECIPE", "one per core, one on a GPU"]),
        ("search", ["searches/RECIPE", "one per core, one on a GPU"]),
    ],
)
def test_help_tells_the_defaults(command, defaults, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = covon(command, "--help").stdout
    assert all(f"[default: {default}]" in text for default in defaults)


@pytest.mark.parametrize(
    ("device", "given", "expected"), [("cpu", [], 6), ("cuda", [], 1), ("cuda", ["--jobs", "2"], 2)]
)
def test_how_many_go_on_at_a_time(device, given, expected, tmp_path, monkeypatch):
    """One per core, but one on a GPU, unless it is said."""
    asked = []

    def fake(*arguments, processes, **options):
        asked.append(processes)
        return []

    def no_pool(workers, *_, **__):
        asked.append(workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    monkeypatch.setattr(cli, "run_grid", fake)
    monkeypatch.setattr(cli_search, "ProcessPoolExecutor", no_pool)
    given = ["--set", f'device="{device}"', "--out", str(tmp_path), *given]
    covon("run", *given)
    covon("search", "permuted-digits", *given)
    assert asked == [expected, expected]


def test_seeds_are_lists_and_ranges_without_repeats():
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds("7, 2-3,2") == [7, 2, 3]
