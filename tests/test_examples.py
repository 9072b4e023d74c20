"""Each example runs from a shell and says what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("avalanche_two_lines.py", "CoVON"),
        ("plain_pytorch.py", "after task 2"),
    ],
)
def test_example(name, promise, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert promise in done.stdout


def test_all_examples_are_tested_and_short():
    names = {p.name for p in EXAMPLES.glob("*.py")}
    assert names == {"avalanche_two_lines.py", "plain_pytorch.py"}
    for name in names:
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 60
