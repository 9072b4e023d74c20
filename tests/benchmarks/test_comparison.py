"""Running what is missing, storing it, and tables in pages."""

import json
from concurrent.futures import ThreadPoolExecutor

import comparison
import pandas as pd
import pytest


def test_only_missing_cases_are_measured_and_stored_with_where(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "WorkerPool", ThreadPoolExecutor)
    file, measured = tmp_path / "cases.jsonl", []
    file.write_text(json.dumps({"name": "a", "lr": 1, "value": 0}) + "\n")

    def measure(case, factor):
        measured.append(case["name"])
        return {"value": factor * case["lr"]}

    cases = [{"name": "a", "lr": 2}, {"name": "b", "lr": 3}]
    for _ in range(2):
        comparison.run_cases(cases, measure, file, 10, key=["name"], processes=1)
    assert measured == ["b"]
    old, new = comparison.read_cases(file)
    assert old["value"] == 0
    assert new["value"] == 30
    assert new["machine"]["cores"] > 0
    assert "torch" in new["versions"]


def test_a_part_of_a_page_is_replaced_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- results: x -->\nold\n<!-- end of results -->\nb\n")
    comparison.replace_part(page, "x", "new\n")
    assert page.read_text() == "a\n<!-- results: x -->\n\nnew\n\n<!-- end of results -->\nb\n"
    with pytest.raises(ValueError, match="has no <!-- results: y -->"):
        comparison.replace_part(page, "y", "new")


def test_mean_and_std():
    assert comparison.mean_and_std(pd.Series([1.0, 3.0])) == "2.00 ± 1.41"
    assert comparison.mean_and_std(pd.Series([1.0])) == "1.00"


@pytest.mark.parametrize("name", ["step", "train"])
def test_the_page_says_where_speed_was_measured(name):
    found = json.loads((comparison.RESULTS / f"speed/{name}.json").read_text(encoding="utf-8"))
    text = (comparison.ROOT / "docs/speed.md").read_text(encoding="utf-8")
    assert f"\n{comparison.provenance(found, 'AVX512')}\n" in text


@pytest.mark.parametrize(
    "name",
    [f"permuted-{data}/results" for data in ("digits", "mnist-hard")]
    + [f"pacs/{order}" for order in ("forward", "reverse", "third", "fourth")],
)
def test_stored_results_are_of_one_comparison(name):
    found = comparison.compared(comparison.RESULTS / f"{name}.jsonl")
    pacs = {"layup", "layup-max", "layup-flip"}
    assert found.best in (pacs if name.startswith("pacs") else {"covon-regmean"})
    assert found.runs["average_accuracy"].between(0, 1).all()
    assert comparison.origin(found.runs).startswith("Mean ± standard deviation over")


def test_a_table_of_one_seed_has_no_standard_deviation():
    found = comparison.compared(comparison.RESULTS / "permuted-digits/results.jsonl").runs
    origin = comparison.origin(found[found["seed"] == found["seed"].min()])
    assert origin.startswith("One seed per row; torch ")
