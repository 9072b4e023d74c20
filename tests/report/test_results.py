"""Loading stored results into a DataFrame."""

import math

import pytest
from made_up_results import made_up, stored

from covon_avalanche import accuracy_matrix, load_results
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.report import write_report
from covon_avalanche.report.results import read_results


def test_folders_files_and_lines_each_run_once(tmp_path):
    infinite = {"nll": math.inf}
    runs = [made_up("covon", s, [[0.5 + s / 10]], calibration=infinite) for s in range(4)]
    runs[0].save(tmp_path / "a/result.json")
    runs[1].save(tmp_path / "b/c/result.json")
    runs[3].save(tmp_path / "d.json")
    lines = stored(tmp_path, *runs[1:3])
    assert read_results([tmp_path, lines, tmp_path / "d.json", tmp_path / "a"]) == runs


def test_linked_folders_are_read_and_damaged_results_left_out(tmp_path, caplog):
    run, damaged = made_up("covon", 0, [[0.5]]), tmp_path / "runs/damaged/result.json"
    run.save(tmp_path / "elsewhere/result.json")
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    (tmp_path / "runs/linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert read_results([tmp_path / "runs"]) == [run]
    assert f"{damaged} is not a result: it is not JSON" in caplog.text
    assert caplog.messages[0].endswith("; it is left out")


def test_unfinished_runs_are_said_to_be_left_out(tmp_path, caplog):
    runs = [made_up("covon", seed, [[0.5]]) for seed in range(2)]
    for run in runs:
        run.save(tmp_path / f"seed-{run.seed}/result.json")
    assert read_results([tmp_path]) == runs
    assert caplog.messages == []
    for seed in (1, 2, 3):
        (tmp_path / f"seed-{seed}").mkdir(exist_ok=True)
        (tmp_path / f"seed-{seed}/run.json").write_text("{}")
    assert read_results([tmp_path]) == runs
    where = f"such as {tmp_path / 'seed-2'}; see `covon status {tmp_path}`"
    assert caplog.messages == [f"left out as unfinished: 2 of 4 runs, {where}"]


def test_the_columns(tmp_path):
    runs = [
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.6]], own={"lr": 0.1}, counts=[30, 10]),
        made_up("rising", 0, [[0.5, 0, 0], [0.9, 0.8, 0], [0.7, 0.6, 0.5]], counts=[10, 30, 40]),
        made_up("joint", 0, [None, [0.9, 0.9]], kind="joint"),
        made_up("icarl", 0, [[0.9]], kind="icarl"),
        made_up("mine", 0, [[0.9]], kind="custom", own={"replay": True}, peak_memory=5),
    ]
    table = load_results(stored(tmp_path, *runs)).set_index("strategy", drop=False)
    covon, joint = table.loc["covon"], table.loc["joint"]
    assert accuracy_matrix(covon).rows == [[0.9, 0.1], [0.8, 0.6]]
    assert covon["max_forgetting"] == covon["forgetting"] == -covon["bwt"] == pytest.approx(0.1)
    assert covon["incremental_accuracy"] == pytest.approx((0.9 + 0.7) / 2)
    rising = table.loc["rising"]
    assert rising["incremental_accuracy"] == pytest.approx((0.5 + 0.85 + 0.6) / 3)
    assert rising["forgetting"] == pytest.approx(0)
    assert rising["max_forgetting"] == pytest.approx((0.2 + 0.2) / 2)
    assert (covon["weighted_accuracy"], covon["train_seconds"]) == (pytest.approx(0.75), 4.0)
    assert (covon["settings.strategy.lr"], covon["settings.epochs"]) == (0.1, 3)
    assert (covon["stream"], covon["evaluated"], covon["recipe"]) == ("Made", "test", "r")
    assert joint[["bwt", "forgetting", "max_forgetting", "sampled_nll"]].isna().all()
    assert math.isnan(joint["incremental_accuracy"])
    assert list(table["offline"][["covon", "joint"]]) == [False, True]
    assert math.isnan(table.loc["icarl", "nll"])  # it predicts no probabilities
    assert (table.loc["mine", "replay"], covon["replay"]) == (True, False)
    assert table.loc["mine", "peak_memory"] == 5


def test_a_title_may_have_any_character_and_blank_lines_are_skipped(tmp_path):
    runs = [made_up("covon", seed, [[0.5]]) for seed in range(3)]
    for run, title in zip(runs, ("a\u2028b", "c\x85d", "e\nf"), strict=True):
        run.settings["title"] = title
    lines = stored(tmp_path, *runs)
    lines.write_text(f"\n{lines.read_text(encoding='utf-8')} \n", encoding="utf-8")
    assert read_results([lines]) == runs


@pytest.mark.parametrize("change", [{"stream": "valid"}, {"settings": {"strategy": {"kind": "a"}}}])
def test_split_and_settings_tell_results_of_one_seed_apart(change, tmp_path):
    run = made_up("covon", 0, [[0.5]])
    runs = [run, run.model_copy(update=change)]
    assert read_results([stored(tmp_path, *runs)]) == runs


def test_results_of_the_same_run_that_differ_are_named(tmp_path):
    old = made_up("covon", 0, [[0.5]], run_hash="a", calibration={"nll": math.nan})
    old.save(tmp_path / "old/result.json")
    old.model_copy(update={"train_seconds": [9.0]}).save(tmp_path / "again/result.json")
    assert len(read_results([tmp_path / "old", tmp_path / "again"])) == 1
    workers = old.settings | {"workers": 3}  # which another machine has
    again = old.model_copy(update={"settings": workers, "run_hash": "b"})
    again.save(tmp_path / "again/result.json")
    assert len(read_results([tmp_path / "old", tmp_path / "again"])) == 1
    new = made_up("covon", 0, [[0.75]], run_hash="b", settings=workers)
    new.save(tmp_path / "new/result.json")
    with pytest.raises(ResultError, match=r"old/result\.json and .*new/result\.json are .* differ"):
        read_results([tmp_path / "old", tmp_path / "new"])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "cannot be read: No such file"),
        (made_up("a", 0, [[0.5]]).model_dump_json().encode() + b"\n{}\n", "line 2 is not a result"),
        ("é".encode("latin-1"), "line 1 is not a result"),
    ],
)
def test_what_is_missing_or_wrong_is_named(content, error, tmp_path):
    file = tmp_path / "stored.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ResultError, match=rf"stored\.jsonl,? {error}"):
        read_results([file])


def test_every_changed_digit_of_a_stored_result_is_found(tmp_path):
    run = made_up("covon", 3, [[0.9, 0.1], [0.8, 0.25]], calibration={"nll": math.inf}, seconds=1.0)
    run.save(tmp_path / "result.json")
    text = (tmp_path / "result.json").read_text(encoding="utf-8")
    places = [i for i, character in enumerate(text) if character.isdigit()]
    assert len(places) > 50
    for i in places:
        changed = f"{text[:i]}{(int(text[i]) + 1) % 10}{text[i + 1 :]}"
        with pytest.raises(ResultError, match=r"r\.json (was changed after|is not|has schema)"):
            Result.parse(changed, "r.json")
    for old, new in ((": ", ":"), ("1.0", "1"), ("0.25", "2.5e-1")):
        assert (layout := text.replace(old, new)) != text
        assert Result.parse(layout, "r.json") == run


@pytest.mark.usefixtures("undrawn")
def test_results_without_a_checksum_are_said_to_be_unchecked_and_stay_so(tmp_path):
    run = made_up("covon", 0, [[0.5]])
    (tmp_path / "result.json").write_text(run.model_dump_json())  # of an earlier version
    old = Result.load(tmp_path / "result.json")
    old.save(tmp_path / "result.json")  # under another name of its recipe, perhaps
    made_up("covon", 1, [[0.5]]).save(tmp_path / "new/result.json")
    runs = load_results(tmp_path)
    assert dict(zip(runs["seed"], runs["checked"], strict=True)) == {0: False, 1: True}
    for found, said in ((runs, True), (runs[runs["checked"]], False)):
        page = write_report(found, tmp_path / "report").read_text(encoding="utf-8")
        assert ("1 of 2 results: earlier versions stored them without a checksum" in page) == said
