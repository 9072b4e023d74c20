"""Commands in the environment of others: a notebook's terminal, a container without a home."""

import os
import subprocess
import sys

from made_up_results import made_up


def test_reports_need_neither_the_backend_of_a_notebook_nor_a_home(tmp_path):
    made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]]).save(tmp_path / "result.json")
    inherited = {"MPLBACKEND": "module://nowhere.backend_inline", "HOME": str(tmp_path / "no/home")}
    arguments = ["report", tmp_path / "result.json", "--out", tmp_path / "report"]
    command = [sys.executable, "-m", "covon_avalanche", *arguments]
    subprocess.run(command, env={**os.environ, **inherited}, check=True)
    assert (tmp_path / "report" / "index.html").is_file()
    assert list((tmp_path / "report" / "figures").glob("*.png"))
    assert not (tmp_path / "no").exists()
