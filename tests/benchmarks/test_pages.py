"""Tables in pages are those that the stored results give, and these are of the recipes."""

import comparison
import pages
import pytest
from made_up_results import made_up, stored

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_settings import same_settings, settings_of, upgrade_settings
from covon_avalanche.report import load_results
from covon_avalanche.report.results import read_results


@pytest.mark.parametrize("page", ["overview", "digits", "permuted-mnist", "first-try"])
def test_tables(page, monkeypatch):
    written = {}
    monkeypatch.setattr(pages.figures, "save", lambda *_: None)
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
        ("first_try_pacs", "first-try/pacs-forward"),
        *(
            (f"first_try_pacs_{order}", f"first-try/pacs-{order}")
            for order in ("reverse", "third", "fourth")
        ),
        ("first_try_pacs_float32", "first-try/pacs-forward-float32"),
        *(
            (f"first_try_pacs_{order}_float32", f"first-try/pacs-{order}-float32")
            for order in ("reverse", "third", "fourth")
        ),
        ("first_try_pacs_vit", "first-try/pacs-vit-forward"),
        ("first_try_pacs_vit_reverse", "first-try/pacs-vit-reverse"),
        ("first_try_pacs_vit_float32", "first-try/pacs-vit-forward-float32"),
        ("first_try_pacs_vit_reverse_float32", "first-try/pacs-vit-reverse-float32"),
        ("first_try_permuted_mnist", "first-try/permuted-mnist-hard-results"),
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
