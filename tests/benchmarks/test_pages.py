"""Tables in pages are those that the stored results give, and these are of the recipes."""

import comparison
import pages
import pytest
from made_up_results import made_up, stored

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_folder import same_settings, settings_of, upgrade_settings
from covon_avalanche.report import load_results
from covon_avalanche.report.results import read_results


@pytest.mark.parametrize("page", ["overview", "digits", "permuted-mnist"])
def test_tables(page, monkeypatch):
    written = {}
    monkeypatch.setattr(pages.figures, "save", lambda *_: None)
    monkeypatch.setattr(
        pages, "replace_part", lambda page, name, text: written.update({(page, name): text})
    )
    pages.PAGES[page]()
    assert written
    for (file, name), text in written.items():
        found = file.read_text(encoding="utf-8").partition(f"<!-- results: {name} -->")[2]
        assert found.partition("<!-- end of results -->")[0].strip() == text.strip()


@pytest.mark.parametrize(
    ("recipe", "file"),
    [
        *((f"pacs_{order}", f"pacs/{order}") for order in ("forward", "reverse", "fourth")),
        ("merging_reverse_longer", "merging/reverse-longer"),
    ],
)
def test_stored_results_are_of_the_recipes(recipe, file):
    recipe = load_recipe(str(pages.ROOT / f"benchmarks/{recipe}.toml"))
    for result in read_results([pages.RESULTS / f"{file}.jsonl"]):
        settings = upgrade_settings(result.settings)
        today = settings_of(recipe, result.strategy)
        assert same_settings(settings, None) == same_settings(today, None)


def test_finished_runs_replace_stored_results(tmp_path):
    file = stored(tmp_path, made_up("covon", 0, [[0.5]]), made_up("covon", 1, [[0.6]]))
    (tmp_path / "runs").mkdir()
    again = made_up("covon", 1, [[0.7]]).model_copy(update={"train_seconds": [9.0]})
    again.save(tmp_path / "runs/result.json")
    pages.store(tmp_path / "runs", file)
    runs = load_results(file).sort_values("seed")
    assert runs["average_accuracy"].to_list() == [0.5, 0.7]
    assert all(row["epochs"] == [] for row in comparison.read_cases(file))


@pytest.mark.parametrize("name", ["pacs", "mnist"])
def test_the_recipes_have_every_cell_and_search_alike(name, tmp_path):
    """16 cells, and each searches its learning rate, and its coefficient if there is one."""
    recipe = load_recipe(str(pages.ROOT / f"benchmarks/merging_{name}.toml"))
    runs = [made_up(strategy, 0, [[0.5]]) for strategy in recipe.strategies]
    found = pages.cells(load_results(stored(tmp_path, *runs)))
    sizes = {"adamw": 6, "covon": 6, "avalanche-ewc": 2, "ada-reg": 2}
    assert found.groupby("training").size().to_dict() == sizes
    coefficient = {"ema": {"merge.gamma"}, "magmax": {"merge.coefficient"}}
    for strategy, training, merge in found[["strategy", "training", "merge"]].to_numpy():
        settings = recipe.strategies[strategy]
        eq8 = (training, merge) == ("covon", "fisher")
        own = {"gamma"} if eq8 else coefficient.get(merge, set())
        assert recipe.search[strategy].keys() == {"lr"} | own
        if training == "covon" and merge in ("none", "fisher"):
            assert settings.merge.rule == "eq8"
            assert (settings.gamma == 1.0) == (merge == "none")
        else:
            assert settings.merge.rule == merge


def test_table_and_effects(tmp_path):
    """Additive effects: CoVON 2 points better, RegMean 10; and one point of interaction."""
    accuracies = {
        "adamw-none": 0.60,
        "adamw-regmean": 0.70,
        "covon-none": 0.62,
        "covon-regmean": 0.76,
        "avalanche-ewc-regmean": 0.5,
        "covon-eq8": 0.7,
    }
    runs = [made_up(name, seed, [[a]]) for name, a in accuracies.items() for seed in (0, 1)]
    found = pages.cells(load_results(stored(tmp_path, *runs)))
    lines = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in pages.factorial_table(found).splitlines()
    ]
    assert lines[0] == ["merge", "AdamW", "CoVON", "Avalanche's EWC", "Ada-Reg"]
    assert lines[2] == ["none", "60.00 ± 0.00", "62.00 ± 0.00", "", ""]
    assert lines[3] == ["Eq. 8 / diagonal Fisher", "", "70.00 ± 0.00", "", ""]
    assert lines[4][:4] == ["RegMean", "70.00 ± 0.00", "76.00 ± 0.00", "50.00 ± 0.00"]
    sentence = pages.main_effects(found)
    assert "over the 2 merges that both have, CoVON is +4.0 points from AdamW" in sentence
    assert "from 61.0 (none) to 73.0 (RegMean)" in sentence
    assert "root mean square of 1.0 points" in sentence
    pages.save_factorial({"forward": found, "mnist": found}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
