"""Tables in pages are those that the stored results give, and these are of the recipes."""

import comparison
import pages
import pandas as pd
import pytest
from made_up_results import made_up, stored

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_settings import same_settings, settings_of, upgrade_settings
from covon_avalanche.report import load_results
from covon_avalanche.report.results import read_results


@pytest.mark.parametrize("page", ["overview", "digits", "permuted-mnist", "language"])
def test_tables(page, monkeypatch, tmp_path):
    written = {}
    monkeypatch.setattr(pages.figures, "save", lambda *_: None)
    new_figure = pages.new_figure
    file = tmp_path / "it.png"
    monkeypatch.setattr(pages, "new_figure", lambda _, *size: new_figure(file, *size))
    monkeypatch.setattr(pages, "replace_part", lambda *part: written.update({part[:2]: part[2]}))
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
        ("pacs_vit_longer", "pacs-vit/longer"),
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


def test_machines_name_their_accelerator():
    machine = {"cores": 16, "processor": "Xeon"}
    assert comparison.machine_name(machine) == "16 cores (Xeon)"
    on_gpu = {**machine, "accelerator": "NVIDIA H100"}
    assert comparison.machine_name(on_gpu) == "NVIDIA H100, 16 cores (Xeon)"


def test_the_table_of_languages():
    """Forgetting is the increase since a language was learned, but for the last one."""
    nats = {
        ("en", 1): (3.0, 9.0, 9.0), ("en", 2): (2.0, 9.0, 9.0), ("de", 3): (2.5, 4.0, 9.0),
        ("fr", 4): (3.0, 4.2, 5.0),
    }  # fmt: skip
    curve = [
        {"learned": learned, "step": step, "language": name, "nats": value, "bits_per_byte": 1.0}
        for (learned, step), values in nats.items()
        for name, value in zip(("en", "de", "fr"), values, strict=True)
    ]
    runs = pd.DataFrame([{"strategy": "covon", "curve": curve, "seconds": 7.0}])
    line = pages.language_table(runs).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["covon", "4.067", "0.600", "20.1", "66.7", "148.4", "1.000", "7"]
