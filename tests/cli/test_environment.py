"""Commands in the environment of others: a notebook's terminal, a container without a home."""

import os
from importlib.metadata import version
from pathlib import Path

from made_up_results import made_up
from terminal import covon, covon_in_a_process


def test_a_home_that_cannot_be_written_is_reported_and_reports_need_no_notebooks_backend(tmp_path):
    made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]]).save(tmp_path / "result.json")
    inherited = {"MPLBACKEND": "module://nowhere.backend_inline", "HOME": str(tmp_path / "no/home")}
    report = ["report", tmp_path / "result.json", "--out", tmp_path / "report"]
    printed = covon_in_a_process(inherited, report, ["env"]).decode()
    assert (tmp_path / "report" / "index.html").is_file()
    assert list((tmp_path / "report" / "figures").glob("*.png"))
    assert not (tmp_path / "no").exists()
    assert "home is writable: no" in printed


def test_what_a_bug_report_needs_is_printed_without_names_of_the_user(tmp_path):
    (tmp_path / "core50").mkdir()
    done = covon("env", "--dataset-root", tmp_path)
    assert done.exit_code == 0
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found["torch"] == version("torch")
    assert found["timm"] == version("timm")
    assert found["data sets"] == "CORe50"
    assert found["devices"].startswith("cpu")
    assert {"python", "covon_avalanche", "processor", "cores", "instructions"} <= found.keys()
    for private in (tmp_path, Path.home(), os.uname().nodename):
        assert str(private) not in done.stdout
