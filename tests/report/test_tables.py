"""Tables in Markdown, LaTeX, CSV and for the terminal."""

import io
import math
import re

import pandas as pd
import pytest
from made_up_results import compared, made_up, made_up_comparison

from covon_avalanche.report import comparisons, results_frame, tables
from covon_avalanche.report.tables import MISSING, SHORT, latex, markdown, summary_table


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_strategy_that_was_not_searched_is_marked_beside_others_that_were():
    def names(searched):
        about = {"name": "r", "title": "t", "searched": searched}
        runs = [made_up(name, 0, [[0.9]]) for name in ("tuned", "mine")]
        for run in runs:
            run.settings.update(about)
        return list(summary_table(compared(*runs))["strategy"])

    assert names(["tuned"]) == ["tuned", "mine (untuned)"]
    assert names([]) == ["tuned", "mine"]


def test_markdown():
    lines = markdown([compared(*made_up_comparison())]).splitlines()
    heads = ["strategy", "A_T %", "difference %", "p", "A_T pooled %", "mean A_t %"]
    heads += ["BWT %", "max forgetting %"]
    assert cells(lines[0])[:8] == heads
    joint = ["joint (offline)", "95.00 ± 0.00", MISSING, MISSING, "95.00 ± 0.00"]
    assert cells(lines[2])[:5] == joint
    assert cells(lines[2])[5] == MISSING
    covon = ["**covon**", "**77.50 ± 2.50**", MISSING, MISSING, "76.25 ± 3.75"]
    assert cells(lines[3])[:5] == covon
    # A_t of the seeds: 0.9 and then 0.8, 0.75, 0.775; 0.9 falls to 0.8, 0.7, 0.75.
    assert cells(lines[3])[5:8] == ["83.75 ± 1.25", "-15.00 ± 5.00", "15.00 ± 5.00"]
    assert cells(lines[4])[:2] == ["buffer (replay)", "75.00 ± 2.50"]
    assert len({len(cells(line)) for line in lines[:6]}) == 1


def test_the_short_table():
    runs = [
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]]),
        made_up("naive", 0, [[0.9, 0.1], [0.3, 0.9]], kind="finetune", seconds=100.0),
        made_up("covon", 1, [[0.9, 0.1], [0.9, 0.9]], seconds=3.0),
        made_up("joint", 0, [None, [0.95, 0.95]], kind="joint"),
    ]
    comparison = compared(*runs)
    lines = tables.markdown_table(comparison, SHORT).splitlines()
    assert cells(lines[0]) == ["strategy", *SHORT]
    assert cells(lines[3]) == ["**covon**", "**85.00 ± 7.07**", "-5.00 ± 7.07", "5.0", "5.0", "2"]
    assert cells(lines[4]) == ["naive", "60.00", "-60.00", "200.0", "5.0", "1"]
    extra = pd.DataFrame({"paper": "about 90"}, index=comparison.summary.index)
    lines = tables.markdown_table(comparison, ("BWT %",), extra).splitlines()
    assert cells(lines[0]) == ["strategy", "BWT %", "paper"]
    assert cells(lines[3]) == ["**covon**", "-5.00 ± 7.07", "about 90"]  # only A_T is bold


def test_columns_are_those_asked_for_with_or_without_their_unit():
    found = [compared(*made_up_comparison())]
    names = ["BWT", "A_T %", "seeds"]
    text = markdown(found, names)
    assert cells(text.splitlines()[0]) == ["strategy", "BWT %", "A_T %", "seeds"]
    assert r"\begin{tabular}{lrrr}" in latex(found, names)
    runs = [made_up(n, s, [[(8 - i * s) / 10]]) for i, n in enumerate("ab") for s in range(3)]
    tested = [compared(*runs)]
    for form in (markdown, latex):
        assert "Mean ± standard deviation over seeds" in form(tested).replace(r"$\pm$", "±")
        assert re.search(r"difference: (A\\_T|\$A_T\$|A_T) minus .* 3 or more:", form(tested))
        assert "difference" not in form(tested, ["A_T"])
    with pytest.raises(ValueError, match="no column is named 'Bwt'; known are A_T, difference,"):
        latex(found, ["Bwt"])


def test_the_pooled_accuracy_is_left_out_only_beside_an_equal_one():
    comparison = compared(made_up("a", 0, [[0.9, 0.1], [0.8, 0.6]]))
    for names, shown in (
        (["A_T pooled", "seeds"], ["A_T pooled %", "seeds"]),
        (["A_T pooled", "A_T"], ["A_T %"]),
    ):
        assert list(summary_table(comparison, names)) == ["strategy", *shown]
    assert "A_T pooled %" not in summary_table(comparison)


def test_latex():
    runs = [*made_up_comparison(), made_up("a_b & c%\\", 0, [[0.5, 0.5]] * 2)]
    text = latex([compared(*runs)])
    columns = len(re.search(r"\\begin\{tabular\}\{(lr*)\}", text).group(1))
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {columns}
    assert r"$A_T$ pooled \% & mean $A_t$ \% & BWT \%" in text
    assert [text.count(f"\\{rule}rule") for rule in ("top", "mid", "bottom")] == [1, 1, 1]
    assert r"strategy & $A_T$ \% &" in text
    assert r"\textbf{covon} & \textbf{77.50 $\pm$ 2.50} & " in text
    assert r"$-$15.00 $\pm$ 5.00" in text  # a minus sign, not a hyphen
    assert r"a\_b \& c\%\textbackslash" in text


def test_csv():
    found = [compared(*made_up_comparison())]
    table = pd.read_csv(io.StringIO(tables.summary_csv(found)), index_col="strategy")
    pd.testing.assert_frame_equal(table, found[0].summary, check_dtype=False, check_names=False)
    names = ("average_accuracy", "weighted_accuracy", "incremental_accuracy", "max_forgetting")
    assert {f"{name}_{kind}" for name in names for kind in ("mean", "std")} <= {*table.columns}
    table = pd.read_csv(io.StringIO(tables.results_csv(found)))
    index = ["strategy", "seed", "domains_learned", "domain"]
    accuracy = table.set_index(index)[["accuracy", "images"]]
    assert {
        key: tuple(row) for key, row in zip(accuracy.index, accuracy.to_numpy(), strict=True)
    } == {
        (run.strategy, run.seed, t, i): (a, run.counts[i - 1])
        for run in made_up_comparison()
        for t, row in enumerate(run.accuracy, 1)
        for i, a in enumerate(row or [], 1)
    }
    assert list(table.columns[:3]) == ["recipe", "stream", "evaluated"]


def test_csv_keeps_runs_apart_that_may_not_be_compared():
    runs = [made_up("a", 0, [[score]]) for score in (0.9, 0.5)]
    runs[1].settings["epochs"] = 9
    found = comparisons(results_frame(runs))
    for text in (tables.summary_csv(found), tables.results_csv(found)):
        assert list(pd.read_csv(io.StringIO(text))["recipe"]) == [c.name for c in found]
    assert found[0].name != found[1].name


def test_remarks_are_in_markdown_and_latex():
    runs = [made_up("a", 0, [[0.9]]), made_up("b", 1, [[0.8]])]
    runs = [run.model_copy(update={"stream": "valid"}) for run in runs]
    texts = markdown([compared(*runs)], ["A_T"]), latex([compared(*runs)], ["A_T"])
    for remark in (
        "The learners were not all run with the same seeds: differences may be due to the seeds.",
        "Accuracies are those on validation images, not on test images.",
    ):
        assert all(remark in text for text in texts)
        assert f"% {remark}\n" in texts[1]


def test_a_run_that_diverged_is_shown_and_sorted_last():
    nan = math.nan
    runs = [made_up("astray", 0, [[0.9, 0.1], [nan, nan]]), *made_up_comparison()[:3]]
    lines = markdown([compared(*runs)]).splitlines()
    names = ["**covon**", "buffer (replay)", "naive", "astray"]
    assert [cells(line)[0] for line in lines[2:6]] == names
    assert cells(lines[5])[1] == MISSING
