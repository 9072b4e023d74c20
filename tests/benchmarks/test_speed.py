"""Timing cases and versions in turns, and the tables of their figures."""

import pandas as pd
import pytest
import speed
import torch
from speed import ratios

SECONDS = {"AdamW fused": 0.1, "CoVON": 0.3}


class SlowingWorker:
    """Times on a machine that becomes slower with every request."""

    slowness = 1.0

    def __init__(self, factor):
        self.factor = factor
        self.about = {"cases": [*SECONDS, f"only with factor {factor}"]}

    def seconds(self, case):
        SlowingWorker.slowness *= 1.0005
        factor = self.factor if case == "CoVON" else 1.0
        return SECONDS.get(case, 1.0) * factor * SlowingWorker.slowness


def test_versions_are_compared_within_rounds():
    workers = {"before": SlowingWorker(1.0), "after": SlowingWorker(2.0)}
    rows = speed.measure_group(workers, "m", 9)
    assert [row["case"] for row in rows] == list(SECONDS)  # that both have
    adamw, covon = rows
    assert adamw["change"] == pytest.approx(1, abs=0.01)
    assert covon["change"] == pytest.approx(2, abs=0.02)
    assert covon["ratio"] == pytest.approx(6, abs=0.05)
    assert covon["before_seconds"] == pytest.approx(covon["seconds"] / 2, rel=0.02)
    assert "change" not in speed.measure_group({"after": SlowingWorker(1.0)}, "m", 9)[1]


def test_a_checkout_without_the_package_is_an_error(tmp_path, monkeypatch):
    about = {"package": "/elsewhere/covon_avalanche/__init__.py"}
    monkeypatch.setattr(speed.subprocess, "Popen", lambda *_, **__: None)
    monkeypatch.setattr(speed.Worker, "_answer", lambda self: about)
    with pytest.raises(RuntimeError, match="has no package, /elsewhere"):
        speed.Worker(tmp_path, "step", "m")


def test_the_table_of_ratios():
    rows = [("MLP", "AdamW", 0.001, 1.0), ("MLP", "CoVON", 0.002, 2.0), ("ViT", "AdamW", 2.0, 1.0)]
    table = ratios(pd.DataFrame(rows, columns=["model", "case", "seconds", "ratio"]))
    assert table.columns.to_list() == ["", "MLP", "ViT"]
    assert table.to_numpy().tolist() == [["AdamW", "1 (1 ms)", "1 (2 s)"], ["CoVON", "2.00", "-"]]


def test_memory_on_a_gpu_is_in_the_table(monkeypatch):
    memory = {"memory_allocated": 1e9, "max_memory_allocated": 3e9, "reset_peak_memory_stats": None}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(speed, "DEVICE", "cpu")
    monkeypatch.setattr(speed, "PEAKS", {})
    cases = speed.on_gpu(speed.step, "MLP 784-100-100-10")
    assert list(cases) == speed.ON_GPU
    rows = pd.DataFrame(speed.PEAKS.items(), columns=["case", "peak_gb"])
    table = ratios(rows.assign(model="MLP", seconds=0.1, ratio=1.0))
    assert table["MLP"].to_list() == ["1 (100 ms), 2.0 GB", *3 * ["1.00, 2.0 GB"]]


def test_without_a_gpu_its_parts_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    speed.measure("gpu-step", {"after": speed.HERE}, short=False)
    assert capsys.readouterr().out == "gpu-step is left out: this machine has no GPU\n"
