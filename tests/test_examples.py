"""Each example runs from a shell and says what it promises."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from miniature import paint

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("accelerate_loop.py", "after task 2"),
        ("avalanche_two_lines.py", "CoVON"),
        ("finetune_pictures.py", "A_T"),
        ("huggingface_trainer.py", "after by sevens"),
        ("lightning_loop.py", "after task 2"),
        ("plain_pytorch.py", "after task 2"),
    ],
)
def test_example(name, promise, tmp_path):
    for domain, kind, i in product(("day", "night"), ("cat", "dog"), range(10)):
        paint(tmp_path / "pictures" / domain / kind / f"{i}.png", 100 * (kind == "cat") + i)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *(["pictures"] if "pictures" in name else [])],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert promise in done.stdout


def test_all_examples_are_tested_and_short():
    (tested,) = [m for m in test_example.pytestmark if m.name == "parametrize"]
    names = {p.name for p in EXAMPLES.glob("*.py")}
    assert names == {name for name, _ in tested.args[1]}
    for name in names:
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 60
