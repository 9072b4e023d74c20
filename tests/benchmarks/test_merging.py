"""The factorial of trainings and merges: names of cells, tables, main effects."""

import merging
import pytest
from made_up_results import made_up, stored

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report import load_results


@pytest.mark.parametrize("name", ["pacs", "mnist"])
def test_the_recipes_have_every_cell_and_search_alike(name, tmp_path):
    """16 cells, and each searches its learning rate, and its coefficient if there is one."""
    recipe = load_recipe(str(merging.ROOT / f"benchmarks/merging_{name}.toml"))
    runs = [made_up(strategy, 0, [[0.5]]) for strategy in recipe.strategies]
    found = merging.cells(load_results(stored(tmp_path, *runs)))
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
    found = merging.cells(load_results(stored(tmp_path, *runs)))
    lines = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in merging.factorial_table(found).splitlines()
    ]
    assert lines[0] == ["merge", "AdamW", "CoVON", "Avalanche's EWC", "Ada-Reg"]
    assert lines[2] == ["none", "60.00 ± 0.00", "62.00 ± 0.00", "", ""]
    assert lines[3] == ["Eq. 8 / diagonal Fisher", "", "70.00 ± 0.00", "", ""]
    assert lines[4][:4] == ["RegMean", "70.00 ± 0.00", "76.00 ± 0.00", "50.00 ± 0.00"]
    sentence = merging.shares(found)
    assert "over the 2 merges that both have, CoVON is +4.0 points from AdamW" in sentence
    assert "from 61.0 (none) to 73.0 (RegMean)" in sentence
    assert "root mean square of 1.0 points" in sentence
    merging.save_figure({"forward": found, "mnist": found}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_search_the_command_is_named(monkeypatch):
    monkeypatch.setattr(merging, "FOLDER", merging.ROOT / "absent")
    with pytest.raises(SystemExit, match=r"run the covon search .* benchmarks/merging_pacs\.toml"):
        merging.recipe_of("forward")
