"""``covon show``, ``covon status``, ``covon recipes`` and ``covon strategies``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_results import made_up
from small_recipes import FEW, STRATEGIES, saved, small_recipe
from terminal import covon, refused

from covon_avalanche.experiment.recipe import load_recipe, recipe_file
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.run_folder import RunFolder, Status


def begun(folder: RunFolder) -> RunFolder:
    """The folder after a start of its run."""
    folder.path.mkdir(parents=True)
    folder.write_start({})
    return folder


def show(argument, command="show"):
    return covon(command, argument).stdout


@pytest.mark.usefixtures("in_this_process", "undrawn")
@pytest.mark.filterwarnings("ignore")
def test_a_report_says_which_runs_it_leaves_out(tmp_path):
    recipe, runs = small_recipe(STRATEGIES, seeds=[0, 1, 2]), tmp_path / "runs"
    for strategy, seed in (("covon", 0), ("finetune", 0), ("finetune", 2)):
        made_up(strategy, seed, [[0.9]]).save(runs / strategy / f"seed-{seed}-0/result.json")
    which = "covon (2 failed), vcl (1 damaged)"
    sentence = f"3 of 6 runs have no result and are left out: {which}."

    def said() -> list[bool]:
        covon("report", runs, "--out", tmp_path / "report")
        files = (tmp_path / "report" / f for f in ("index.html", "table.md", "table.tex"))
        return [sentence in file.read_text(encoding="utf-8") for file in files]

    assert not any(said())
    for seed in (1, 2):
        begun(RunFolder(runs, recipe, "covon", seed)).write_failure("the loss is NaN")
    begun(RunFolder(runs, recipe, "vcl", 0)).result_file.write_text("{")
    assert all(said())


def test_a_recipe_is_printed_as_it_stands(tmp_path):
    text = show("permuted-digits")
    assert text == recipe_file("permuted-digits").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("permuted-digits")
    assert "\npermuted-digits: Permuted digits" in covon("recipes").stdout


def test_a_recipe_that_extends_another_is_printed_as_a_whole(tmp_path):
    (tmp_path / "mine.toml").write_text(text := show("core50-clip"), encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("#")]
    own = recipe_file("core50-clip").read_text(encoding="utf-8").splitlines()
    assert head == own[: len(head)]  # comments of the other recipe need not hold for this one
    assert "extends" not in text
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("core50-clip")


def test_a_shipped_name_comes_before_a_file_or_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pacs").mkdir()
    Path("permuted-digits").write_text(text := recipe_file("pacs-vit").read_text("utf-8"), "utf-8")
    for name in ("pacs", "permuted-digits"):
        assert load_recipe(name).name == name
        assert f'name = "{name}"' in show(name)
    assert load_recipe("./permuted-digits").name == "pacs-vit"
    assert show("./permuted-digits") == text
    assert refused("show", "./pacs") == "covon: no run has been started in pacs"
    assert refused("status", "./pcas") == "covon: there is no folder pcas"


def test_classes_that_a_recipe_would_import_are_listed_and_not_imported(tmp_path):
    own = STRATEGIES["custom"] | {"implementation": "no_such_module:X"}
    file = saved(small_recipe({"mine": own, "finetune": STRATEGIES["finetune"]}), tmp_path)
    assert show(file).startswith("# A run imports no_such_module:X: that executes its module.\n")
    assert show(file).endswith(file.read_text())


def test_the_runs_of_a_folder_are_listed_with_their_state(tmp_path, tmp_path_factory):
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, stream=FEW)
    folders = [begun(RunFolder(tmp_path, recipe, "finetune", seed)) for seed in range(6)]
    progress = "domain 2/2, epoch 3/4, loss 0.250, accuracy 50.0 %, 1,500 images/s"
    status = Status(domains=1, of_domains=2, share=0.875, text=progress)
    for folder in folders[:3]:
        folder.write_status(status)
    folders[1].write_failure("the loss is [nan]")
    folders[3].write_result(made_up("finetune", 3, [[0.9, 0.1], [0.8, 0.8]]))
    folders[4].result_file.write_text("{")
    elsewhere = folders[5].path.rename(tmp_path_factory.mktemp("elsewhere") / "run")
    folders[5].path.symlink_to(elsewhere, target_is_directory=True)
    with folders[0].opened():
        assert show(tmp_path) == show(tmp_path, "status")
        summary = show(tmp_path).splitlines()[-1]
        lines = [line for line in show(tmp_path).splitlines() if "seed-" in line]
    states = ["running", "failed", "interrupted", "finished", "damaged", "interrupted"]
    parts = [progress, "the loss is [nan]", progress, "A_T 80.00 %", "is not a result", ""]
    assert len(lines) == len(states)
    assert summary == "1 running, 1 failed, 2 interrupted, 1 finished, 1 damaged"
    for folder, line, state, part in zip(folders, lines, states, parts, strict=True):
        assert "finetune" in line
        assert folder.path.name in line
        assert state in line
        assert part in line


def test_the_status_lists_results_that_were_copied_without_their_settings(tmp_path):
    for seed in range(2):
        made_up("covon", seed, [[0.8]]).save(tmp_path / f"covon/seed-{seed}-0/result.json")
    lines = show(tmp_path, "status").splitlines()
    rows = [["covon", f"seed-{seed}-0", "finished"] for seed in range(2)]
    assert [line.split()[:3] for line in lines[2:4]] == rows
    assert lines[-1] == "2 finished"


def test_the_status_of_several_recipes_names_them(tmp_path):
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, stream=FEW)
    for name in ("mine", "yours"):
        begun(RunFolder(tmp_path / name, recipe, "finetune", 0))
    lines = [line for line in show(tmp_path, "status").splitlines() if "seed-" in line]
    assert [line.split()[0] for line in lines] == ["mine", "yours"]


def test_every_kind_of_strategy_has_a_line():
    lines = covon("strategies").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(KINDS)
    stores = {line.partition(":")[0] for line in lines if "Stores examples." in line}
    assert stores == {"replay", "icarl", "gem", "agem", "der", "er-ace", "td-vcl"}
    assert "ewc: EWC, its penalties kept as one quadratic. Needs lr, ewc_lambda." in lines


def test_the_status_shows_what_tells_the_runs_of_a_strategy_apart(tmp_path):
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, stream=FEW, epochs=5)
    faster = small_recipe({"finetune": STRATEGIES["finetune"] | {"lr": 0.5}}, stream=FEW, epochs=8)
    other = small_recipe({"vcl": STRATEGIES["vcl"]})
    named = (recipe, "finetune"), (faster, "finetune"), (other, "vcl")
    folders = [begun(RunFolder(tmp_path, own, name, 0)) for own, name in named]
    lines = [line for line in show(tmp_path, "status").splitlines() if "seed-" in line]
    by_run = {line.split()[1]: line.partition("interrupted")[2].strip() for line in lines}
    expected = ["epochs 5, lr 0.01", "epochs 8, lr 0.5", ""]
    assert by_run == dict(zip((f.path.name for f in folders), expected, strict=True))
    (folders[1].path / "run.json").write_text("{")
    assert "epochs" not in show(tmp_path, "status")


def test_a_command_ends_when_the_reader_of_its_output_has_exited():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "covon_avalanche", "strategies"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
