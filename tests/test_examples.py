"""Each example runs and says what it promises."""

import re
import runpy
import sys
from itertools import product
from pathlib import Path

import pytest
from miniature import paint
from terminal import torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "accelerate_loop.py": "after task 2",
    "avalanche_torchrun.py": "1 processes: ",
    "avalanche_two_lines.py": "CoVON",
    "finetune_pictures.py": "A_T",
    "huggingface_trainer.py": "after by sevens",
    "lightning_loop.py": "after task 2",
    "plain_pytorch.py": "after task 2",
}
assert PROMISES.keys() == {p.name for p in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.filterwarnings("ignore")
def test_example(name, tmp_path, monkeypatch, capsys):
    """With one epoch, or two in loops of the example's own."""
    for domain, kind, i in product(("day", "night"), ("cat", "dog"), range(10)):
        paint(tmp_path / "pictures" / domain / kind / f"{i}.png", 100 * (kind == "cat") + i)
    monkeypatch.setattr(sys, "argv", [name, *(["pictures"] if "pictures" in name else [])])
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    text = re.sub(r"epochs=\d+,", "epochs=1,", text).replace("in range(20)", "in range(2)")
    Path(name).write_text(text, encoding="utf-8")
    runpy.run_path(name, run_name="__main__")
    assert PROMISES[name] in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_torchrun_shares_the_batches_of_avalanche(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "avalanche_torchrun.py").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(text.replace("train_epochs=10", "train_epochs=4"), encoding="utf-8")
    printed = torchrun(script)
    accuracy = float(re.search(r"2 processes: ([\d.]+) %", printed)[1])
    assert accuracy > 75  # 33 after one domain
