"""The report's files: complete, well-formed, safe and repeatable."""

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
from made_up_results import made_up, made_up_comparison

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run_folder import settings_of
from covon_avalanche.report import comparisons, results_frame, write_report
from covon_avalanche.report.page import headline, settings_tables
from covon_avalanche.report.tables import MISSING

NASTY = '<script>alert("1")</script> $x^2$ & 100% _|`\\'
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What a test asks of a page; fails where tags are not balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.text[tag] = self.text.get(tag, "") + data.replace("\xa0", " ")

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder):
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def written(results, folder, **options):
    return page_of(write_report(results_frame(results), folder, **options).parent)


def compared(*results):
    return comparisons(results_frame(results))


class TestHeadline:
    def test_it_says_what_the_numbers_say(self, report):
        text = page_of(report).text["p"]
        assert "covon has the highest accuracy of the continual learners: 77.50 ± 2.50 %" in text
        assert "17.50 points below the ceiling joint" in text

    def test_a_winner_with_replay_does_not_hide_the_best_without(self):
        three = [("er", 0.9, "replay"), ("covon", 0.8, "covon"), ("all", 0.95, "cumulative")]
        (comparison,) = compared(*(made_up(name, 0, [[a]], kind=kind) for name, a, kind in three))
        text = headline(comparison)
        assert text.startswith("er has the highest")
        assert "It uses replay; the best without is covon with 80.00 %." in text

    def test_one_learner_none_and_other_seeds(self):
        (alone,) = compared(made_up("covon", 3, [[0.9]]))
        assert headline(alone) == "covon reaches 90.00 % (A_T, mean over domains, 1 seed)."
        (ceiling,) = compared(made_up("joint", 0, [[0.9]], kind="joint"))
        assert "there is no best strategy" in headline(ceiling)
        (other,) = compared(made_up("a", 0, [[0.9]]), made_up("b", 1, [[0.8]]))
        assert "different seeds" in headline(other)


class TestPage:
    def test_it_needs_no_network_and_no_other_file(self, report):
        text = (report / "index.html").read_text(encoding="utf-8")
        for _, attributes in Page(text).tags:
            for name in ("src", "href", "xlink:href", "action", "srcset"):
                target = attributes.get(name) or "#"
                assert target.startswith(("#", "data:")), target
        assert "@import" not in text
        assert all(url.startswith("#") for url in re.findall(r"url\(['\"]?([^)]*)", text))

    def test_identifiers_are_unique_and_references_resolve(self, report):
        text = (report / "index.html").read_text(encoding="utf-8")
        names = [a["id"] for _, a in Page(text).tags if "id" in a]
        assert len(names) == len(set(names))
        used = re.findall(r'(?:url\(#|href="#)([^")]+)', text)
        assert used
        assert set(used) <= set(names)

    def test_figures_have_captions_and_the_colours_of_the_page(self, report):
        page = page_of(report)
        figures = page.all("svg")
        assert len(figures) == 5 + 4  # curves, forgetting, time, memory, calibration; matrices
        assert all(f["role"] == "img" and len(f["aria-label"]) > 30 for f in figures)
        assert "highest covon with 77.5 %" in figures[0]["aria-label"]
        assert page.text["title"].count("Accuracy matrix of") == 4
        text = (report / "index.html").read_text(encoding="utf-8")
        drawn = text[text.index("<svg") :]
        assert "currentColor" in drawn
        assert "var(--c0)" in drawn
        assert "#1b1f24" not in drawn  # invisible on a dark page

    def test_sorting_has_numbers_to_sort_by(self, report):
        page = page_of(report)
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
            assert re.fullmatch(r"[a-z0-9-]+\.(svg|png)", path.name)
            if path.suffix == ".svg":
                ElementTree.parse(path)
        table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert "<" not in "".join(table)
        assert set(pd.read_csv(tmp_path / "table.csv")["strategy"]) == {NASTY, "hidden"}

    def test_recipes_and_streams_have_sections_of_their_own(self, tmp_path):
        results = [
            made_up("covon", 0, [[0.9]], recipe="one"),
            made_up("covon", 0, [[0.8]], recipe="two"),
            made_up("covon", 0, [[0.7]], recipe="two", stream={"name": "Other"}),
        ]
        page = written(results, tmp_path)
        assert [a["id"] for a in page.all("section")] == ["one", "two", "two-2"]
        assert [a["href"] for a in page.all("a")] == ["#one", "#two", "#two-2"]
        assert (tmp_path / "figures/two-2-curves.svg").exists()
        found = pd.read_csv(tmp_path / "table.csv")
        assert list(found["stream"]) == ["Made", "Made", "Other"]
        assert (tmp_path / "table.tex").read_text().count(r"\toprule") == 3

    def test_columns_are_shown_where_they_are_known(self, tmp_path):
        sampled = {"average_accuracy": 0.75, "nll": 0.5, "brier": 0.25, "ece": 0.125}
        known = made_up("covon", 0, [[0.9]], peak_memory=3 * 2**20, sampled=sampled)
        astray = made_up("astray", 0, [[math.nan]])
        page = written([known, astray], tmp_path)
        assert "peak MiB" in page.text["th"]
        assert "sampled NLL" in page.text["th"]
        assert "BWT" not in page.text["th"]
        assert "75.00" in page.text["td"]
        assert "nan" in page.text["td"]
        assert {a["data-value"] for a in page.all("td") if "data-value" in a} > {""}
        assert "No test of significance" in page.text["p"]


class TestSettings:
    def test_settings_that_differ_and_that_do_not(self):
        (comparison,) = compared(
            made_up("a", 0, [[0.9]], own={"lr": 0.1, "schedule": [{"lr": 1.0}], "beta": None}),
            made_up("b", 0, [[0.8]], own={"lr": 0.1, "ess": 5.0}),
            made_up("b", 1, [[0.8]], own={"lr": 0.1, "ess": 6.0}),
        )
        differing, common = settings_tables(comparison)
        assert differing.to_dict("index") == {
            "a": {"schedule": '[{"lr": 1.0}]', "ess": MISSING},
            "b, ess=5.0": {"schedule": MISSING, "ess": "5"},
            "b, ess=6.0": {"schedule": MISSING, "ess": "6"},
        }
        assert common == {
            "kind": "covon", "lr": "0.1", "epochs": "3",
            "stream.name": "Made", "stream.n_experiences": "1",
        }  # fmt: skip

    def test_an_empty_text_is_shown_as_one(self):
        runs = []
        for weights in ("", "default"):
            settings = settings_of(load_recipe("pacs", [f"model.weights={weights}"]), "finetune")
            run = made_up("finetune", 0, [[0.9]], recipe="pacs")
            runs.append(run.model_copy(update={"settings": settings}))
        found = compared(*runs)
        assert [settings_tables(c)[1]["model.weights"] for c in found] == ['""', "default"]
        titles = [c.title.rpartition("(")[2] for c in found]
        assert titles == ['model.weights="")', "model.weights=default)"]


class TestFiles:
    def test_which_there_are(self, report):
        names = {p.name for p in report.iterdir()}
        tables = {"table.md", "table.tex", "table.csv", "results.csv"}
        assert names == {"index.html", *tables, "figures"}
        stems = ["calibration", "curves", "forgetting", "memory", "time"]
        stems += [f"matrix-{name}" for name in ("buffer", "covon", "joint", "naive")]
        pictures = sorted(p.name for p in (report / "figures").iterdir())
        assert pictures == sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
        for path in (report / "figures").glob("*.png"):
            assert path.read_bytes().startswith(b"\x89PNG")
        for path in (report / "figures").glob("*.svg"):
            ElementTree.parse(path)

    def test_the_same_results_give_the_same_bytes(self, report, tmp_path):
        with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
            write_report(results_frame(made_up_comparison()), tmp_path)
            assert matplotlib.rcParams["font.size"] == 30
        mine = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.*")}
        first = {p.relative_to(report): p.read_bytes() for p in report.rglob("*.*")}
        assert mine == first

    def test_a_failed_write_leaves_the_old_page(self, tmp_path, monkeypatch):
        runs = results_frame([made_up("covon", 0, [[0.9]])])
        page = write_report(runs, tmp_path)
        before = page.read_bytes()

        def full(*_):
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            write_report(runs, tmp_path, title="another")
        assert page.read_bytes() == before
        assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]

    def test_reporting_needs_no_torch(self):
        code = "import sys, covon_avalanche.report; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "False"
