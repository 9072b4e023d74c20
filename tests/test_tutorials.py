"""Tutorials run in short form, are notebooks, and their stored outputs are of the same code."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import covon

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PRINTED = {"covon_in_ten_minutes": "BWT", "compare_your_method": "average_accuracy"}
PRINTED |= {"what_the_posterior_knows": "AUROC"}
assert PRINTED.keys() == {p.stem for p in TUTORIALS.glob("*.py")} - {"record"}


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
@pytest.mark.parametrize("name", PRINTED)
def test_tutorial(name, record, tmp_path, monkeypatch):
    monkeypatch.setenv("COVON_SHORT", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
    assert PRINTED.keys() == {*record.NAMES}
    (is_code, first), *_ = record.cells(text)
    assert not is_code
    assert first.startswith("# # ")
    outputs = record.run(text, name, tmp_path)
    assert PRINTED[name] in "\n".join(output["text"] for output in outputs)
    assert len(list(tmp_path.glob("*.png"))) == (name == "what_the_posterior_knows")
    stored = json.loads((TUTORIALS / "outputs" / f"{name}.json").read_text(encoding="utf-8"))
    changed = f"the code of {name}.py has changed: python tutorials/record.py {name}"
    assert stored["code"] == record.code_hash(text), changed
    assert len(stored["outputs"]) == len(outputs)
    for output in stored["outputs"]:
        if "figure" in output:
            assert (TUTORIALS.parent / "docs" / output["figure"]).exists()
