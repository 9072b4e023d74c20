"""What differs between two runs, and ``covon compare``."""

import pytest
from made_up_results import made_up
from typer.testing import CliRunner

from covon_avalanche.cli import app
from covon_avalanche.report import results_frame
from covon_avalanche.report.compare import result_differences, settings_differences


def pair(*results):
    return [row for _, row in results_frame(results).iterrows()]


def test_differences_by_hand():
    a, b = pair(
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.6]], own={"lr": 0.1, "gamma": 0.9}),
        made_up("covon", 1, [[0.9, 0.1], [0.9, 0.6]], own={"lr": 0.2}),
    )
    assert set(settings_differences(a, b).itertuples(name=None)) == {
        ("strategy.lr", 0.1, 0.2),
        ("strategy.gamma", 0.9, None),
        ("seed", 0, 1),
    }
    found = result_differences(a, b)
    names = {"average_accuracy", "weighted_accuracy", "bwt", "forgetting", "max_forgetting"}
    assert set(found.index) == {*names, "accuracy on domain 1"}
    assert list(found.loc["accuracy on domain 1"]) == pytest.approx([0.8, 0.9])
    assert list(found.loc["bwt"]) == pytest.approx([-0.1, 0])
    assert settings_differences(a, a).empty
    assert result_differences(a, a).empty


def test_earlier_accuracies_count_as_results():
    rows = [[0.9, 0.1, 0.2], [0.8, 0.9, 0.2], [0.7, 0.7, 0.7]]
    other = [[0.9, 0.3, 0.2], [0.8, 0.9, 0.1], [0.7, 0.7, 0.7]]
    found = result_differences(*pair(made_up("covon", 0, rows), made_up("covon", 0, other)))
    assert list(found.index) == ["accuracy on domain 2 after domain 1 (differs most)"]
    assert list(found.iloc[0]) == pytest.approx([0.1, 0.3])


def test_the_command_prints_square_brackets_as_they_are(tmp_path):
    for name, accuracy in (("[/b]", 0.5), ("[pilot]", 0.75)):
        run = made_up("covon", 0, [[accuracy]], own={"note": name})
        run.save(tmp_path / name.strip("[/]") / "result.json")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "b"), str(tmp_path / "pilot")])
    assert done.exit_code == 0, done.output
    assert "[/b]" in done.stdout
    assert "[pilot]" in done.stdout
    assert "+0.25" in done.stdout
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "b"), str(tmp_path / "b")])
    assert "The settings are the same.\nThe results are the same." in done.stdout
    done = CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path / "b")])
    assert done.exit_code == 2
    assert "has 2 runs; name the folder of one" in done.stderr
