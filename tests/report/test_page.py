"""The report's files: complete, well-formed, safe and repeatable."""

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree
from zipfile import ZipFile

import matplotlib
import pandas as pd
import pytest
from made_up_results import compared, made_up, made_up_comparison

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_settings import run_hash, settings_of
from covon_avalanche.report import (
    figures,
    load_results,
    results_frame,
    write_archive,
    write_report,
)
from covon_avalanche.report.figures import FORMS
from covon_avalanche.report.page import recipe
from covon_avalanche.report.tables import MISSING, class_table, settings_table

NASTY = '<script>alert("1")</script> $x^2$ & 100% _|`\\' + 150 * "%"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The tags and texts of a page; fails where tags are not balanced."""

    def __init__(self, folder):
        super().__init__()
        self.open, self.tags, self.text = [], [], {}
        self.feed((folder / "index.html").read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.text[tag] = self.text.get(tag, "") + data.replace("\xa0", " ")

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of the report of ``made_up_comparison``, with words for figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "rendered", lambda _, form: form.encode())
        runs = results_frame(made_up_comparison())
        return write_report(runs, tmp_path_factory.mktemp("report")).parent


def written(results, folder, **options):
    return Page(write_report(results_frame(results), folder, **options).parent)


def run_of(name, strategy="covon", changes=(), seed=0):
    """A run with the settings of a shipped recipe."""
    settings = settings_of(load_recipe(name, changes), strategy)
    return made_up(strategy, seed, [[0.9]], recipe=name).model_copy(update={"settings": settings})


class TestHeadline:
    def test_it_says_what_the_numbers_say(self, report):
        text = Page(report).text["p"]
        assert "covon has the highest accuracy of the continual learners: 77.50 ± 2.50 %" in text
        assert "Offline training, joint, reaches 95.00 ± 0.00 %." in text
        assert "Not significantly different from the best (p ≥ 0.05): buffer" in text

    @pytest.mark.usefixtures("undrawn")
    def test_a_winner_with_replay_does_not_hide_the_best_without_if_there_is_one(self, tmp_path):
        three = [("er", 0.9, "replay"), ("covon", 0.8, "covon"), ("all", 0.95, "cumulative")]
        results = [made_up(name, 0, [[a]], kind=kind) for name, a, kind in three]
        results.append(made_up("joint", 0, [[0.9]], kind="joint", recipe="offline"))
        results.append(made_up("covon", 0, [[math.nan]], recipe="diverged"))
        text = written(results, tmp_path).text["p"]
        assert "er has the highest" in text
        assert "It uses replay; the best without replay, covon, has 80.00 %." in text
        assert text.count("there is no best strategy") == 2

    @pytest.mark.usefixtures("undrawn")
    def test_it_names_the_strategy_that_the_others_were_compared_with(self, tmp_path):
        lucky = made_up("lucky", 0, [[0.9, 0.1], [0.99, 0.99]], counts=[30, 10])
        text = written([lucky, *made_up_comparison()], tmp_path).text["p"]
        assert "covon has the highest accuracy of the continual learners with at least 3 " in text
        assert "lucky has" not in text
        kinds = {"er": ("replay", 0.9, 3), "lucky": ("covon", 0.95, 1), "covon": ("covon", 0.8, 3)}
        results = [
            made_up(name, seed, [[accuracy]], kind=kind)
            for name, (kind, accuracy, seeds) in kinds.items()
            for seed in range(seeds)
        ]
        text = written(results, tmp_path / "replay").text["p"]
        assert "It uses replay; the best without replay, covon, has 80.00 ± 0.00 %." in text


class TestPage:
    def test_it_needs_no_network_and_no_other_file(self, report):
        for _, attributes in Page(report).tags:
            for name in ("src", "href", "action", "srcset"):
                target = attributes.get(name) or "#"
                assert target.startswith(("#", "data:")), target
        text = (report / "index.html").read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(", text)

    @pytest.mark.usefixtures("undrawn")
    def test_runs_on_image_files_are_repeated_with_the_folder_of_the_data(self, tmp_path):
        stream = {"name": "DomainFolders", "folder": "mine", "domains": ["day"], "image_size": 8}
        for own, said in ((stream, True), (None, False)):
            text = written([made_up("covon", 0, [[0.9]], stream=own)], tmp_path).text["p"]
            assert ("with --dataset-root FOLDER" in text) is said

    def test_figures_are_embedded_and_described(self, report):
        page = Page(report)
        images = page.all("img")
        assert len(images) == 5 + 4  # curves, forgetting, time, memory, calibration; matrices
        assert all(len(image["alt"]) > 20 for image in images)
        svg = base64.b64decode(images[0]["src"].removeprefix("data:image/svg+xml;base64,"))
        assert svg == (report / "figures/curves.svg").read_bytes()
        matrices = [image["alt"] for image in images if "matrix" in image["alt"]]
        assert matrices[0] == "Accuracy matrix of joint"

    def test_every_accuracy_has_its_own_column_and_meaning(self, report):
        columns = [a["title"] for a in Page(report).all("th") if "title" in a]
        assert len(columns) == len(set(columns))
        text = (report / "index.html").read_text(encoding="utf-8")
        for heading in ("A<sub>T</sub> pooled %", "mean A<sub>t</sub> %", "max forgetting %"):
            assert text.count(f">{heading}<") == 2  # table and legend

    def test_sorting_has_numbers_to_sort_by(self, report):
        page = Page(report)
        values = [a["data-value"] for a in page.all("td") if a.get("class") == "main"]
        assert [float(v) for v in values] == pytest.approx([0.95, 0.775, 0.75, 0.625])
        assert [a["aria-sort"] for a in page.all("th") if "aria-sort" in a] == ["descending"]

    def test_names_do_not_break_out(self, tmp_path):
        rows = [[0.9, 0.2], [0.8, 0.9]]
        more = {"own": {NASTY: NASTY}, "versions": {NASTY: NASTY}}
        results = [
            made_up(NASTY, 0, rows, recipe=NASTY, **more),
            made_up("hidden", 0, rows, recipe=NASTY, machine={"cpu": NASTY}),
        ]
        page = written(results, tmp_path, title=NASTY)
        assert len(page.all("script")) == 1
        assert page.text["h1"] == NASTY
        assert NASTY in page.text["th"]
        for path in (tmp_path / "figures").iterdir():
            assert re.fullmatch(r"[\w%.~-]+\.(pdf|png|svg)", path.name)
            if path.suffix == ".svg":
                ElementTree.parse(path)
        text = (tmp_path / "table.md").read_text(encoding="utf-8")
        table = text.split("\n\n")[0].splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert "<" not in text
        assert set(pd.read_csv(tmp_path / "table.csv")["strategy"]) == {NASTY, "hidden"}

    @pytest.mark.usefixtures("undrawn")
    def test_names_and_settings_of_strangers_may_be_long_empty_and_of_any_type(self, tmp_path):
        deep: dict = {"unset": None, "kept": [None, 1]}
        for _ in range(60):
            deep = {"deep": deep}
        long, other = "%" * 200, "%" * 199 + "&"
        more = {"own": {"none": None, "deep": deep}, "machine": {"cpu": ["a", {"b": None}]}}
        stream = {"name": None, "domains": 7}
        runs = [
            made_up(name, 0, [[0.9]], recipe=recipe, stream=stream, **more)
            for recipe in (long, other)
            for name in (long, other)
        ]
        with ZipFile(write_archive(runs, tmp_path / "report")) as archive:
            names = archive.namelist()
        assert max(len(part) for name in names for part in name.split("/")) < 150
        recipes = [name for name in names if name.endswith(".toml")]
        assert len(recipes) == 2
        for form in FORMS:  # curves and matrices of both strategies, of both recipes
            shown = [n for n in names if n.endswith(form) and "-memory" not in n]
            assert len(set(shown)) >= 2 * 3
        text = recipe(compared(*runs[:2]))
        assert "unset" not in text
        assert "kept = [\n    1,\n]" in text

    @pytest.mark.usefixtures("undrawn")
    def test_recipes_and_streams_have_sections_of_their_own(self, tmp_path):
        results = [
            made_up("covon", 0, [[0.9]], recipe="one"),
            made_up("covon", 0, [[0.8]], recipe="two"),
            made_up("covon", 0, [[0.7]], recipe="two", stream={"name": "Other"}),
        ]
        page = written(results, tmp_path)
        sections = [a["id"] for a in page.all("section")]
        assert re.fullmatch("one two-[0-9a-f]{6} two-[0-9a-f]{6}", " ".join(sections))
        assert [a["href"] for a in page.all("a")] == [f"#{name}" for name in sections]
        identifiers = [a["id"] for _, a in page.tags if "id" in a]
        assert len(set(identifiers)) == len(identifiers)
        assert all((tmp_path / f"figures/{name}-curves.svg").exists() for name in sections)
        assert list(pd.read_csv(tmp_path / "table.csv")["stream"]) == ["Made", "Made", "Other"]
        assert (tmp_path / "table.tex").read_text().count(r"\toprule") == 3

    @pytest.mark.usefixtures("undrawn")
    def test_columns_are_shown_where_they_are_known(self, tmp_path):
        sampled = {"average_accuracy": 0.75, "nll": 0.5, "brier": 0.25, "ece": 0.125}
        known = made_up("covon", 0, [[0.9]], peak_memory=3 * 2**20, sampled=sampled)
        other = made_up("astray", 1, [[math.nan]])
        page = written([known, other], tmp_path)
        assert "peak MiB" in page.text["th"]
        assert "sampled NLL" in page.text["th"]
        assert "BWT" not in page.text["th"]
        assert "75.00" in page.text["td"]
        assert {a["data-value"] for a in page.all("td") if "data-value" in a} > {""}
        assert "No test of significance" in page.text["p"]
        assert "not all run with the same seeds" in page.text["p"]

    @pytest.mark.usefixtures("undrawn")
    def test_no_test_of_equal_differences_is_not_put_down_to_a_lack_of_seeds(self, tmp_path):
        scores = {"a": 0.9, "b": 0.8}
        runs = [made_up(name, seed, [[a]]) for name, a in scores.items() for seed in range(3)]
        assert "in which their difference varies" in written(runs, tmp_path).text["p"]
        runs += [made_up("c", seed, [[seed / 10]]) for seed in range(3)]
        assert "or the difference is the same in all" in written(runs, tmp_path).text["p"]


@pytest.mark.usefixtures("undrawn")
class TestSettings:
    def test_accuracy_by_class_is_shown_where_it_is_known(self, tmp_path):
        found = [{"dog": 0.5, "cat": 0.25}, {"dog": 1.0, "cat": 0.25}, {}]
        rows = [[0.9, 0.2], [0.8, 0.9]]
        names = ("a", 0), ("a", 1), ("b", 0)
        runs = [made_up(*n, rows, class_accuracy=c) for n, c in zip(names, found, strict=True)]
        table = class_table(compared(*runs))
        assert table.to_dict() == {"a": {"dog": 75.0, "cat": 25.0}}
        for shown, known in ((runs, True), (runs[2:], False)):
            written(shown, tmp_path)
            page = (tmp_path / "index.html").read_text(encoding="utf-8")
            assert ("Accuracy by class" in page) == (">75.0</td>" in page) == known
        runs[2] = made_up("b", 0, rows, class_accuracy={"cat": 0.5})  # data without dogs
        written(runs, tmp_path)
        page = (tmp_path / "index.html").read_text(encoding="utf-8")
        assert f'<td data-value="75.0">75.0</td><td data-value="">{MISSING}</td>' in page
        assert '"nan"' not in page

    def test_settings_that_differ(self):
        comparison = compared(
            made_up("a", 0, [[0.9]], own={"lr": 0.1, "schedule": [{"lr": 1.0}]}),
            made_up("b", 0, [[0.8]], own={"lr": 0.1, "ess": 5.0}),
            made_up("c", 0, [[0.8]], own={"lr": 0.1, "ess": 1e-9}),
        )
        assert settings_table(comparison).to_dict("index") == {
            "a": {"schedule": "[{'lr': 1.0}]", "ess": MISSING},
            "b": {"schedule": MISSING, "ess": "5"},
            "c": {"schedule": MISSING, "ess": "1e-09"},
        }

    def test_the_recipe_repeats_all_runs(self, tmp_path):
        changes = [["strategies.covon.lr=0.5"], ["strategies.covon.lr=0.3"], []]
        runs = [run_of("permuted-digits", changes=c, seed=s) for c in changes for s in (3, 5)]
        runs.append(run_of("permuted-digits", "finetune", seed=3))
        text = recipe(compared(*runs))
        (tmp_path / "again.toml").write_text(text, encoding="utf-8")
        again = load_recipe(str(tmp_path / "again.toml"))
        assert again.seeds == [3, 5]
        first = [run_hash(load_recipe("permuted-digits", c), "covon", 3) for c in changes]
        finetune = run_hash(load_recipe("permuted-digits"), "finetune", 3)
        assert {run_hash(again, name, 3) for name in again.strategies} == {*first, finetune}
        page = written(runs, tmp_path)
        assert text in page.text["pre"]
        assert "0.3" in page.text["td"]  # of the settings that differ

    @pytest.mark.parametrize("source", [{}, {"source": "ebdd4d2e52"}])
    def test_the_recipe_needs_the_files_of_classes_that_ran(self, source, tmp_path):
        own = {"lr": 0.1, "implementation": "mine:C"} | source
        page = written([made_up("mine", 0, [[0.9]], kind="custom", own=own)], tmp_path)
        assert ('source = "ebdd4d2e52"' in page.text["pre"]) == bool(source)
        assert ("run only with the same files" in page.text["p"]) == bool(source)


class TestFiles:
    def test_which_there_are(self, report):
        names = {p.name for p in report.iterdir()}
        tables = {"table.md", "table.tex", "table.csv", "results.csv"}
        assert names == {"index.html", *tables, "figures"}
        shown = ["calibration", "curves", "forgetting", "memory", "time"]
        shown += [f"matrix-{name}" for name in ("buffer", "covon", "joint", "naive")]
        pictures = {p.name for p in (report / "figures").iterdir()}
        assert pictures == {f"{name}.{kind}" for name in shown for kind in FORMS}

    def test_the_same_results_give_the_same_bytes(self, tmp_path, monkeypatch):
        """With figures of lines, of bars and of colours."""
        names, every = ("curves", "calibration", "matrix-covon"), figures.figures_of
        monkeypatch.setattr(figures, "figures_of", lambda comparison: every(comparison, *names))
        runs, found = [run for run in made_up_comparison() if run.strategy == "covon"], []
        for look in ({}, {"font.size": 30, "axes.facecolor": "red"}):
            folder = tmp_path / str(len(look))
            with matplotlib.rc_context(look):
                write_report(results_frame(runs), folder)
                assert look.items() <= matplotlib.rcParams.items()
            found.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.*")})
        assert found[0] == found[1]
        assert len(found[0]) == 5 + len(names) * len(FORMS)


@pytest.mark.usefixtures("undrawn")
def test_the_archive_has_all_that_the_report_was_made_of(tmp_path):
    results, report = made_up_comparison(), tmp_path / "report"
    write_report(results_frame([made_up("old", 0, [[0.9]])]), report)
    file = write_archive(results, report)
    assert file == tmp_path / "report.zip"
    with ZipFile(file) as archive:
        archive.extractall(tmp_path / "got")
    shown = {p.relative_to(report) for p in report.rglob("*.*")}
    got = {p.relative_to(tmp_path / "got") for p in (tmp_path / "got").rglob("*.*")}
    assert got - shown == {Path("r.toml"), Path("results.jsonl")}
    assert shown - got == {Path(f"figures/matrix-old.{kind}") for kind in FORMS}
    again = load_results(tmp_path / "got" / "results.jsonl")
    in_order = sorted(results, key=lambda r: (r.recipe, r.seed))
    pd.testing.assert_frame_equal(again, results_frame(in_order))
