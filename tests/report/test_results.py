"""Finding results, and what differs between two."""

import math

import pytest
from made_up_results import made_up
from typer.testing import CliRunner

from covon_avalanche import accuracy_matrix, load_results
from covon_avalanche.cli import app
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.report.results import read_results, results_frame


def test_folders_files_and_lines_each_run_once(tmp_path):
    runs = [made_up("covon", seed, [[0.5 + seed / 10]]) for seed in range(4)]
    runs[0].save(tmp_path / "a/result.json")
    runs[1].save(tmp_path / "b/c/result.json")
    lines = "".join(r.model_dump_json() + "\n" for r in runs[1:3])
    (tmp_path / "stored.jsonl").write_text(lines)
    runs[3].save(tmp_path / "d.json")
    paths = [tmp_path, tmp_path / "stored.jsonl", tmp_path / "d.json", tmp_path / "a"]
    assert read_results(paths) == runs


def test_the_columns(tmp_path):
    runs = [
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.6]], own={"lr": 0.1}, counts=[30, 10]),
        made_up("joint", 0, [None, [0.9, 0.9]], kind="joint"),
        made_up("icarl", 0, [[0.9]], kind="icarl"),
        made_up("mine", 0, [[0.9]], kind="custom", own={"replay": True}, peak_memory=5),
    ]
    for run in runs:
        run.save(tmp_path / run.strategy / "result.json")
    table = load_results(tmp_path).set_index("strategy", drop=False)
    covon, joint = table.loc["covon"], table.loc["joint"]
    assert accuracy_matrix(covon).rows == [[0.9, 0.1], [0.8, 0.6]]
    assert covon["max_forgetting"] == covon["forgetting"] == -covon["bwt"] == pytest.approx(0.1)
    assert (covon["weighted_accuracy"], covon["train_seconds"]) == (pytest.approx(0.75), 4.0)
    assert (covon["settings.strategy.lr"], covon["settings.epochs"]) == (0.1, 3)
    assert (covon["stream"], covon["evaluated"], covon["recipe"]) == ("Made", "test", "r")
    assert joint[["bwt", "forgetting", "max_forgetting", "sampled_nll"]].isna().all()
    assert list(table["ceiling"][["covon", "joint"]]) == [False, True]
    assert math.isnan(table.loc["icarl", "nll"])  # it predicts no probabilities
    assert (table.loc["mine", "replay"], covon["replay"]) == (True, False)
    assert table.loc["mine", "peak_memory"] == 5


@pytest.mark.parametrize(
    ("own", "replay"),
    [
        ({"n_steps": 3}, True),
        ({"n_steps": 1}, False),
        ({"n_steps": 3, "replay_tasks": 0}, False),
        ({"n_steps": 3, "replay_examples": 0}, False),
    ],
)
def test_td_vcl_is_marked_where_it_stores_examples(own, replay):
    assert results_frame([made_up("td", 0, [[0.9]], kind="td-vcl", own=own)])["replay"][0] == replay


def test_a_title_may_have_any_character(tmp_path):
    titles = ["a\u2028b", "c\x85d", "e\nf"]
    runs = [made_up("covon", seed, [[0.5]]) for seed in range(3)]
    for run, title in zip(runs, titles, strict=True):
        run.settings["title"] = title
    lines = "".join(run.model_dump_json() + "\n" for run in runs)
    (tmp_path / "stored.jsonl").write_text(lines, encoding="utf-8")
    found = read_results([tmp_path / "stored.jsonl"])
    assert [run.settings["title"] for run in found] == titles


def test_what_is_evaluated_tells_results_of_one_run_apart(tmp_path):
    test = made_up("covon", 0, [[0.5]])
    valid = test.model_copy(update={"stream": "valid"})
    test.save(tmp_path / "a/result.json")
    valid.save(tmp_path / "b/result.json")
    assert read_results([tmp_path]) == [test, valid]


def test_results_of_the_same_run_that_differ_are_named(tmp_path):
    old = made_up("covon", 0, [[0.5]], run_hash="a")
    old.save(tmp_path / "old/result.json")
    old.model_copy(update={"train_seconds": [9.0]}).save(tmp_path / "again/result.json")
    assert read_results([tmp_path / "old", tmp_path / "again"]) == [old]
    made_up("covon", 0, [[0.75]], run_hash="a").save(tmp_path / "new/result.json")
    with pytest.raises(
        ResultError, match=r"old/result\.json and .*new/result\.json are .* differ: covon"
    ):
        read_results([tmp_path / "old", tmp_path / "new"])


def test_settings_tell_results_without_a_hash_apart(tmp_path):
    runs = [made_up("covon", 0, [[0.5]], own={"lr": lr}) for lr in (0.1, 0.2)]
    for i, run in enumerate(runs):
        run.save(tmp_path / f"{i}/result.json")
    assert read_results([tmp_path]) == runs


def test_results_that_do_not_go_together_are_one_sentence(tmp_path):
    for name in "ab":
        run = made_up("covon", 0, [[0.5]], run_hash=name)
        run.save(tmp_path / name / "result.json")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "report")])
    assert done.exit_code == 2
    assert "got two of 'covon' in recipe 'r' with seed 0" in done.stderr
    assert not (tmp_path / "report").exists()


def test_what_is_missing_or_wrong_is_named(tmp_path):
    with pytest.raises(ResultError, match=r"nothing\.jsonl cannot be read: No such file"):
        read_results([tmp_path / "nothing.jsonl"])
    (tmp_path / "stored.jsonl").write_text(made_up("a", 0, [[0.5]]).model_dump_json() + "\n{}\n")
    with pytest.raises(ResultError, match=r"stored\.jsonl, line 2 is not a result"):
        read_results([tmp_path / "stored.jsonl"])
    (tmp_path / "stored.jsonl").write_bytes("é".encode("latin-1"))
    with pytest.raises(ResultError, match=r"stored\.jsonl has no results: it is not text"):
        read_results([tmp_path / "stored.jsonl"])


def test_numbers_that_are_not_finite_survive(tmp_path):
    nan = {"nll": float("inf"), "brier": float("nan"), "ece": 0.5}
    made_up("a", 0, [[0.5]]).model_copy(update={"calibration": nan}).save(tmp_path / "r.json")
    stored = Result.load(tmp_path / "r.json").calibration
    assert stored["nll"] == float("inf")
    assert stored["brier"] != stored["brier"]


def test_results_of_the_first_schema_can_be_read(tmp_path):
    new = made_up("covon", 0, [[0.5]])
    later = {"reliability", "run_hash", "held_out", "sampled", "epochs", "peak_memory", "resumed"}
    old = new.model_copy(update={"schema_version": 1}).model_dump_json(exclude=later)
    (tmp_path / "r.json").write_text(old)
    assert Result.load(tmp_path / "r.json").average_accuracy == new.average_accuracy
