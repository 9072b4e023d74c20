"""A grid of runs that is killed."""

import random
import subprocess
from types import SimpleNamespace

import kills
import pytest
from terminal import covon


@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_a_killed_grid_loses_nothing_and_ends_with_the_same_results(tmp_path, monkeypatch):
    """All its processes are killed, soon after the first has begun to work."""

    def run(command, **_):
        covon(*command[command.index("covon_avalanche") + 1 :])

    monkeypatch.setattr(kills, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    found = kills.measure(1, 2, tmp_path, random.Random(7))
    assert found["kills"] == 1
    assert found["results"] >= len(kills.STRATEGIES)
    assert {what: found[what] for what in kills.WRONG} == dict.fromkeys(kills.WRONG, 0)
