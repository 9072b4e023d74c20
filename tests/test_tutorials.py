"""Tutorials run in short form, are notebooks, and their stored outputs are of the same code."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import covon

TUTORIALS = Path(__file__).parents[1] / "tutorials"


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(TUTORIALS)
    import record

    return record


@pytest.fixture
def no_processes(in_this_process, monkeypatch):
    """Commands run in the process of the test."""

    start = subprocess.run

    def run(command, cwd=None, **options):
        if "covon_avalanche" not in command:
            return start(command, cwd=cwd, **options)
        monkeypatch.chdir(cwd)
        done = covon(*command[command.index("covon_avalanche") + 1 :])
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, returncode=done.exit_code)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "printed", "figures"),
    [
        ("covon_in_ten_minutes", "BWT", 0),
        ("compare_your_method", "average_accuracy", 0),
        ("what_the_posterior_knows", "AUROC", 1),
    ],
)
def test_tutorial(name, printed, figures, record, tmp_path, monkeypatch):
    monkeypatch.setenv("COVON_SHORT", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
    outputs = record.run(text, name, tmp_path)
    assert printed in "\n".join(output["text"] for output in outputs)
    assert len(list(tmp_path.glob("*.png"))) == figures
    stored = json.loads((TUTORIALS / "outputs" / f"{name}.json").read_text(encoding="utf-8"))
    changed = f"the code of {name}.py has changed: python tutorials/record.py {name}"
    assert stored["code"] == record.code_hash(text), changed
    assert len(stored["outputs"]) == len(outputs)
    for output in stored["outputs"]:
        if "figure" in output:
            assert (TUTORIALS.parent / "docs" / output["figure"]).exists()


def test_all_tutorials_are_tested_and_start_with_a_heading(record):
    (tested,) = [m for m in test_tutorial.pytestmark if m.name == "parametrize"]
    scripts = {file.stem for file in TUTORIALS.glob("*.py")} - {"record"}
    assert scripts == {name for name, *_ in tested.args[1]} == set(record.NAMES)
    for name in scripts:
        (is_code, first), *_ = record.cells((TUTORIALS / f"{name}.py").read_text("utf-8"))
        assert not is_code
        assert first.startswith("# # ")
