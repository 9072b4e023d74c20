"""``covon compare``."""

import pytest
from made_up_results import made_up
from terminal import covon


@pytest.fixture
def compare(tmp_path):
    """What the command prints about two runs, as lists of words."""

    def printed(*runs):
        paths = [tmp_path / f"{i}.json" for i in range(2)]
        for run, path in zip(runs, paths, strict=True):
            run.save(path)
        done = covon("compare", *paths)
        return [line.split() for line in done.stdout.splitlines()]

    return printed


def test_what_differs_is_printed_by_name(compare):
    lines = compare(
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.6]], own={"note": "[/b]", "gamma": 0.9}),
        made_up("covon", 1, [[0.9, 0.1], [0.9, 0.6]], own={"note": "[pilot]"}),
    )
    results = lines.index(["Different", "results:"])
    assert lines[0] == ["Different", "settings:"]
    settings = "seed 0 1", "strategy.gamma 0.9 -", "strategy.note [/b] [pilot]"
    assert sorted(lines[2:results]) == [line.split() for line in settings]
    found = {" ".join(line[:-2]): line[-2:] for line in lines[results + 2 :]}
    changed = {"average_accuracy", "weighted_accuracy", "bwt", "forgetting", "max_forgetting"}
    changed |= {"incremental_accuracy"}
    changed |= {"average accuracy after domain 2", "final accuracy on domain 1"}
    assert set(found) == changed
    assert [float(value) for value in found["average_accuracy"]] == pytest.approx([0.7, 0.75])


def test_a_run_equals_itself(compare):
    run = made_up("covon", 0, [None, [0.9, 0.9]], kind="joint")
    assert compare(run, run) == [f"The {x} are the same.".split() for x in ("settings", "results")]
