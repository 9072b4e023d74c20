"""``covon env``."""

import os
from importlib.metadata import version
from pathlib import Path

from terminal import covon


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
