"""Timing cases and versions in turns, and the tables of their figures."""

import pandas as pd
import pytest
import speed
from speed_table import changes, ratios

SECONDS = {"AdamW fused": 0.1, "CoVON": 0.3}


class SlowingWorker:
    """Answers like ``speed_cases.py`` on a machine that becomes slower with every request."""

    slowness = 1.0

    def __init__(self, factor):
        self.factor = factor

    def ask(self, **request):
        if "part" in request:
            return [*SECONDS, f"only with factor {self.factor}"]
        SlowingWorker.slowness *= 1.0005
        factor = self.factor if request["case"] == "CoVON" else 1.0
        return SECONDS.get(request["case"], 1.0) * factor * SlowingWorker.slowness


def test_versions_are_compared_within_rounds():
    workers = {"before": SlowingWorker(1.0), "after": SlowingWorker(2.0)}
    rows = speed.measure_group(workers, "step", 1, {"model": "m", "optimizers": []}, 8.0)
    assert [row["case"] for row in rows] == list(SECONDS)  # that both have
    adamw, covon = rows
    assert adamw["change"] == pytest.approx(1, abs=0.01)
    assert covon["change"] == pytest.approx(2, abs=0.02)
    assert covon["ratio"] == pytest.approx(6, abs=0.05)
    assert covon["before_ratio"] == pytest.approx(3, abs=0.03)


def test_one_version_has_no_change():
    workers = {"after": SlowingWorker(1.0)}
    covon = speed.measure_group(workers, "step", 1, {"model": "m", "optimizers": []}, 8.0)[1]
    assert covon["ratio"] == pytest.approx(3, abs=0.03)
    assert "change" not in covon


def test_a_checkout_without_the_package_is_an_error(tmp_path, monkeypatch):
    about = {"package": "/elsewhere/covon_avalanche/__init__.py"}
    monkeypatch.setattr(speed.subprocess, "Popen", lambda *_, **__: None)
    monkeypatch.setattr(speed.Worker, "_answer", lambda self: about)
    with pytest.raises(RuntimeError, match="has no package, /elsewhere"):
        speed.Worker(tmp_path, {})


def test_the_table_of_ratios():
    rows = pd.DataFrame(
        {
            "model": ["MLP", "MLP", "ViT"],
            "threads": 1,
            "case": ["AdamW", "CoVON", "AdamW"],
            "seconds": [0.001, 0.002, 2.0],
            "ratio": [1.0, 2.0, 1.0],
            "before_seconds": [0.001, 0.004, 2.0],
            "change": [1.0, 0.5, 1.0],
            "change_25": [0.9, 0.4, 1.0],
            "change_75": [1.1, 0.6, 1.0],
        }
    )
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in ratios(rows).splitlines()]
    assert cells[0] == ["", "MLP", "ViT"]
    assert cells[2:] == [["AdamW", "1 (1 ms)", "1 (2 s)"], ["CoVON", "2.00", "-"]]
    line = [c.strip() for c in changes(rows).splitlines()[3].split("|")[1:-1]]
    assert line == ["MLP", "CoVON", "1", "4 ms", "2 ms", "0.500", "0.400 to 0.600"]
