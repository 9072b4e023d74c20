"""The report: numbers against those by hand, files that are well-formed, safe and repeatable."""

import csv
import math
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import pytest
from made_up_results import made_up

from covon_avalanche.evaluation.reliability import ReliabilityBin
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.recipe_text import recipe_text
from covon_avalanche.experiment.result import Epoch, ResultError
from covon_avalanche.experiment.run_folder import settings_of
from covon_avalanche.report import heat_maps, reproduce, write_report
from covon_avalanche.report.canvas import looks
from covon_avalanche.report.columns import NOTHING
from covon_avalanche.report.label_places import place_labels
from covon_avalanche.report.section import sections_of, unique_slugs
from covon_avalanche.report.settings_table import settings_table
from covon_avalanche.report.statistics import holm, paired_p
from covon_avalanche.report.tables import escape_latex, latex, markdown

NASTY = '<script>alert("1")</script> $x^2$ & 100% _|`\\'
VOID = {"meta", "link", "br", "hr", "img", "input"}


def comparison():
    """Three learners and a ceiling on two domains; counts differ, so weighting matters."""
    kinds = {"covon": "covon", "naive": "finetune", "buffer": "replay"}
    found = []
    for seed, drop in enumerate((0.0, 0.1, 0.05)):
        rows = {
            "naive": [[0.9, 0.1], [0.3 + drop, 0.9]],
            "covon": [[0.9, 0.1], [0.8 - drop, 0.8]],
            "buffer": [[0.9, 0.1], [0.6, 0.85 + drop]],
        }
        found += [
            made_up(name, seed, cells, kind=kinds[name], counts=[30, 10])
            for name, cells in rows.items()
        ]
        ceiling = [None, [0.95, 0.95]]
        found.append(made_up("joint", seed, ceiling, kind="joint", counts=[30, 10]))
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of the report of the comparison."""
    return write_report(comparison(), tmp_path_factory.mktemp("report")).parent


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


class TestNumbers:
    def test_means_and_deviations_by_hand(self, report):
        covon = next(r for r in rows_of(report / "table.csv") if r["strategy"] == "covon")
        # A_T of the seeds: 0.8, 0.75, 0.775; weighted 0.8, 0.725, 0.7625.
        assert float(covon["average_accuracy_mean"]) == pytest.approx(0.775)
        assert float(covon["average_accuracy_std"]) == pytest.approx(0.025)
        assert float(covon["weighted_accuracy_mean"]) == pytest.approx(0.7625)
        assert float(covon["bwt_mean"]) == pytest.approx(-0.15)
        assert float(covon["bwt_std"]) == pytest.approx(0.05)
        assert float(covon["forgetting_mean"]) == pytest.approx(0.15)
        assert float(covon["nll_mean"]) == 0.5
        assert float(covon["seconds_mean"]) == 4.0
        assert float(covon["parameters_worth"]) == 5.0
        assert (covon["seeds"], covon["best"], covon["peak_memory_bytes"]) == ("3", "1", "")

    def test_the_highest_comes_first_and_a_ceiling_is_never_the_best(self, report):
        found = rows_of(report / "table.csv")
        assert [r["strategy"] for r in found] == ["joint", "covon", "buffer", "naive"]
        assert [r["ceiling"] for r in found] == ["1", "0", "0", "0"]
        assert [r["replay"] for r in found] == ["0", "0", "1", "0"]
        assert [r["best"] for r in found] == ["0", "1", "0", "0"]
        assert found[0]["bwt_mean"] == found[0]["p_value"] == ""

    def test_markdown(self, report):
        lines = (report / "table.md").read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("| strategy | A_T % | p | by image % | BWT % | forgetting % |")
        assert lines[2].startswith(f"| joint (ceiling) | 95.00 ± 0.00 | {NOTHING} | 95.00 ± 0.00 |")
        assert lines[3].startswith("| **covon** | **77.50 ± 2.50** | best | 76.25 ± 3.75 |")
        assert lines[4].startswith("| buffer (replay) | 75.00 ± 2.50 |")
        assert len({line.count("|") for line in lines[:6]}) == 1

    def test_every_accuracy_of_every_run_survives_the_csv(self, report):
        cells = {
            (r["strategy"], int(r["seed"]), int(r["domains_learned"]), int(r["domain"])): (
                float(r["accuracy"]),
                int(r["images"]),
            )
            for r in rows_of(report / "results.csv")
        }
        wanted = {
            (run.strategy, run.seed, t + 1, i + 1): (a, run.counts[i])
            for run in comparison()
            for t, row in enumerate(run.accuracy)
            for i, a in enumerate(row or [])
        }
        assert cells == wanted

    def test_the_headline_says_what_the_numbers_say(self, report):
        text = page_of(report).text["p"]
        assert "covon has the highest accuracy of the continual learners: 77.50 ± 2.50 %" in text
        assert "17.50 points below the ceiling joint" in text

    def test_a_winner_with_replay_does_not_hide_the_best_without(self):
        three = [("er", 0.9, "replay"), ("covon", 0.8, "covon"), ("all", 0.95, "cumulative")]
        results = [made_up(name, 0, [[a]], kind=kind) for name, a, kind in three]
        (section,) = sections_of(results)
        assert section.best.strategy == "er"
        assert section.best_without_replay.strategy == "covon"

    def test_a_strategy_of_the_users_says_itself_that_it_stores_examples(self):
        own = [{"replay": True}, {"replay": False}, {}]
        runs = [made_up(str(o), 0, [[0.9]], kind="custom", own=o) for o in own]
        assert [s.replay for s in sections_of(runs)[0].in_order] == [True, False, False]

    @pytest.mark.parametrize(
        ("own", "replay"),
        [
            ({"n_steps": 3}, True),
            ({"n_steps": 2, "replay_tasks": 1, "replay_examples": 1}, True),
            ({"n_steps": 1}, False),
            ({"n_steps": 3, "replay_tasks": 0}, False),
            ({"n_steps": 3, "replay_examples": 0}, False),
        ],
    )
    def test_td_vcl_is_marked_where_it_stores_examples(self, own, replay):
        (section,) = sections_of([made_up("td", 0, [[0.9]], kind="td-vcl", own=own)])
        assert section.in_order[0].replay is replay

    def test_a_best_strategy_of_other_seeds_is_said_to_be_one(self, tmp_path):
        runs = [made_up("a", seed, [[0.8]]) for seed in range(3)]
        others = {0: [made_up("b", seed, [[0.7]]) for seed in range(3)]}
        others[1] = [made_up("b", 7, [[0.9]])]
        others[2] = [made_up("all", 7, [[0.9]], kind="joint")]  # is not compared
        said = []
        for number, other in others.items():
            page = page_of(write_report([*runs, *other], tmp_path / str(number)).parent)
            said.append(page.text["p"].count("different seeds") == 1)
            assert ("not all run with the same seeds" in page.text["p"]) is said[-1]
        assert said == [False, True, False]

    def test_distances_are_no_probabilities(self, tmp_path):
        bins = [ReliabilityBin(10, 0.75, 0.5)]
        low, high = ({"nll": x, "brier": x, "ece": x} for x in (0.1, 0.9))
        runs = [
            made_up("icarl", 0, [[0.9]], kind="icarl", calibration=low, reliability=bins),
            made_up("covon", 0, [[0.8]], calibration=high, reliability=bins),
        ]
        page = page_of(write_report(runs, tmp_path).parent)
        assert "NLL covon with 0.900" in page.text["figcaption"]
        assert "covon is 75.0 % sure" in page.text["figcaption"]
        assert [r["ece_mean"] for r in rows_of(tmp_path / "table.csv")] == ["", "0.9"]

    def test_matrices_are_means_over_seeds(self):
        (section,) = sections_of(comparison())
        covon = next(s for s in section.standings if s.strategy == "covon")
        assert covon.matrix[1] == pytest.approx([0.75, 0.8])
        assert covon.forgetting_by_domain == pytest.approx([0.15])
        assert [mean for mean, _ in covon.curve] == pytest.approx([0.9, 0.775])


class TestSignificance:
    def test_the_closed_form_for_three_pairs(self):
        first, second = [0.9, 0.8, 0.85], [0.7, 0.75, 0.7]
        differences = [0.2, 0.05, 0.15]
        mean = sum(differences) / 3
        std = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
        t = mean / (std / math.sqrt(3))
        # Student's t with two degrees of freedom has an elementary distribution function.
        assert paired_p(first, second) == pytest.approx(1 - t / math.sqrt(2 + t * t))

    def test_nothing_is_tested_where_nothing_can_be(self):
        assert paired_p([0.9, 0.8], [0.7, 0.75]) is None
        assert paired_p([0.9, 0.8, math.nan], [0.7, 0.75, 0.7]) is None
        assert paired_p([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) is None  # no spread
        assert paired_p([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]) == 1.0

    def test_holm_by_hand(self):
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])

    def test_only_common_seeds_are_paired(self):
        best = [made_up("best", s, [[0.9 + s / 100]]) for s in range(5)]
        other = [made_up("other", s, [[0.8 + (s % 3) / 50]]) for s in range(2, 9)]
        few = [made_up("few", s, [[0.7]]) for s in (0, 1, 7, 8)]
        (section,) = sections_of([*best, *other, *few])
        common = range(2, 5)
        by_hand = paired_p([0.9 + s / 100 for s in common], [0.8 + (s % 3) / 50 for s in common])
        assert section.p_values == {"other": pytest.approx(by_hand)}
        assert f"| few | 70.00 ± 0.00 | {NOTHING} |" in markdown([section])


class TestPage:
    def test_it_needs_no_network_and_no_other_file(self, report):
        text = (report / "index.html").read_text(encoding="utf-8")
        page = Page(text)
        for _, attributes in page.tags:
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

    def test_every_figure_says_in_words_what_it_shows(self, report):
        figures = page_of(report).all("svg")
        assert len(figures) == 5 + 4  # curves, forgetting, time, memory, calibration; matrices
        assert all(f["role"] == "img" and len(f["aria-label"]) > 30 for f in figures)
        words = [f["aria-label"] for f in figures]
        assert "After 2 domains covon has 77.5 %, the highest, and naive 62.5 %, " in words[0]
        assert "covon loses least, 15.0 points on average, and naive most, 55.0" in words[1]
        (mine,) = (w for w in words if "Accuracy matrix of covon." in w)
        assert "from 75.0 % on domain 1 to 80.0 % on domain 2" in mine
        assert page_of(report).text["title"].count("Accuracy matrix of") == 4

    def test_figures_take_the_colours_of_the_page(self, report):
        text = (report / "index.html").read_text(encoding="utf-8")
        drawn = text[text.index("<svg") :]
        assert "currentColor" in drawn
        assert "var(--c0)" in drawn
        assert "#1b1f24" not in drawn  # ink that a dark page would swallow

    def test_sorting_has_numbers_to_sort_by(self, report):
        page = page_of(report)
        values = [a["data-value"] for a in page.all("td") if a.get("class") == "main"]
        assert [float(v) for v in values] == pytest.approx([0.95, 0.775, 0.75, 0.625])
        assert [a["aria-sort"] for a in page.all("th") if "aria-sort" in a] == ["descending"]

    def test_names_do_not_break_out(self, tmp_path):
        own = {NASTY: NASTY}
        rows = [[0.9, 0.2], [0.8, 0.9]]
        results = [
            made_up(NASTY, 0, rows, own=own, recipe=NASTY, versions={NASTY: NASTY}),
            made_up("_hidden", 0, rows, recipe=NASTY, machine={"cpu": NASTY}),
        ]
        page = Page(write_report(results, tmp_path, title=NASTY).read_text(encoding="utf-8"))
        assert len(page.all("script")) == 1
        assert page.text["h1"] == NASTY
        assert NASTY in page.text["th"]
        assert ">_hidden<" in (tmp_path / "figures/curves.svg").read_text(encoding="utf-8")
        for path in (tmp_path / "figures").iterdir():
            assert re.fullmatch(r"[a-z0-9-]+\.(svg|png)", path.name)
            if path.suffix == ".svg":
                ElementTree.parse(path)
        table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert not re.search(r"(?<!\\)<", "".join(table))
        assert {r["strategy"] for r in rows_of(tmp_path / "table.csv")} == {NASTY, "_hidden"}


class TestLatex:
    def test_escapes_by_hand(self):
        assert escape_latex("a_b & 5% #1 {x}") == r"a\_b \& 5\% \#1 \{x\}"
        assert escape_latex("\\~^$<|>") == (
            r"\textbackslash{}\textasciitilde{}\textasciicircum{}\$"
            r"\textless{}\textbar{}\textgreater{}"
        )
        assert escape_latex("a\nb") == "a b"

    def test_rows_have_as_many_cells_as_the_table_has_columns(self):
        text = latex(sections_of([*comparison(), made_up("a_b & c%", 0, [[0.5, 0.5]] * 2)]))
        columns = len(re.search(r"\\begin\{tabular\}\{(l r*|lr*)\}", text).group(1))
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {columns}
        assert [text.count(f"\\{rule}rule") for rule in ("top", "mid", "bottom")] == [1, 1, 1]
        assert r"\textbf{covon} & $\mathbf{77.50 \pm 2.50}$ & best & $76.25 \pm 3.75$" in text
        assert r"a\_b \& c\% &" in text


class TestFiles:
    def test_which_there_are(self, report):
        names = {p.name for p in report.iterdir()}
        assert names == {
            "index.html", "table.md", "table.tex", "table.csv", "results.csv", "figures",
        }  # fmt: skip
        pictures = sorted(p.name for p in (report / "figures").iterdir())
        stems = [*("calibration", "curves", "forgetting", "memory", "time")]
        stems += [f"matrix-{name}" for name in ("buffer", "covon", "joint", "naive")]
        assert pictures == sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
        for path in (report / "figures").glob("*.png"):
            assert path.read_bytes().startswith(b"\x89PNG")
        for path in (report / "figures").glob("*.svg"):
            ElementTree.parse(path)

    def test_the_same_results_give_the_same_bytes(self, report, tmp_path):
        with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
            write_report(comparison(), tmp_path)
            assert matplotlib.rcParams["font.size"] == 30
        mine = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.*")}
        first = {p.relative_to(report): p.read_bytes() for p in report.rglob("*.*")}
        assert mine == first

    def test_a_failed_write_leaves_the_old_page(self, tmp_path, monkeypatch):
        results = [made_up("covon", 0, [[0.9]])]
        page = write_report(results, tmp_path)
        before = page.read_bytes()

        def full(*_):
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            write_report(results, tmp_path, title="another")
        assert page.read_bytes() == before
        assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]

    def test_reporting_needs_no_torch(self):
        code = "import sys, covon_avalanche.report; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "False"


class TestEdges:
    def test_no_results(self, tmp_path):
        with pytest.raises(ValueError, match="at least one result, got none"):
            write_report([], tmp_path / "new")
        assert not (tmp_path / "new").exists()

    def test_the_same_run_twice(self):
        twice = [made_up("covon", 7, [[0.9]]), made_up("covon", 7, [[0.8]])]
        with pytest.raises(ResultError, match="got two of 'covon' with seed 7 in recipe 'r'"):
            sections_of(twice)

    def test_runs_of_other_numbers_of_domains(self):
        both = [[0.9, 0.1], [0.8, 0.8]], [[0.9]]
        stream = {"name": "Made"}
        runs = [made_up("covon", seed, rows, stream=stream) for seed, rows in enumerate(both)]
        with pytest.raises(ResultError, match="same domains, got 2 and 1 of 'covon'"):
            sections_of(runs)

    def test_a_strategy_has_a_row_for_each_of_its_settings(self, tmp_path):
        own = {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2, "gamma": 0.9}
        runs = [made_up("covon", seed, [[0.9]], own=o) for o in own for seed in (0, 1)]
        runs.append(made_up("vcl", 0, [[0.8]], own={"lr": 0.3}))
        page = page_of(write_report(runs, tmp_path).parent)
        found = {r["strategy"]: r["seeds"] for r in rows_of(tmp_path / "table.csv")}
        assert found == {
            "covon, lr=0.1": "2", "covon, lr=0.2": "2", "covon, lr=0.2, gamma=0.9": "2", "vcl": "1",
        }  # fmt: skip
        assert page.text["code"].count("--strategies covon --seeds 0,1") == 3

    def test_runs_of_other_common_settings_have_another_section(self):
        runs = [made_up("covon", 0, [[0.9]]), made_up("vcl", 0, [[0.9]])]
        runs[1].settings["epochs"] = 1
        runs.append(runs[0].model_copy(update={"stream": "valid"}))
        assert [(s.title, [x.strategy for x in s.in_order]) for s in sections_of(runs)] == [
            ("title of r (evaluated=test, epochs=3)", ["covon"]),
            ("title of r (evaluated=test, epochs=1)", ["vcl"]),
            ("title of r (evaluated=valid, epochs=3)", ["covon"]),
        ]

    def test_a_setting_that_became_known_since_and_has_its_default_makes_no_other_section(self):
        new = settings_of(load_recipe("permuted-digits"), "ewc")
        common = {k: v for k, v in new.items() if k not in ("device", "workers", "eval_mb_size")}
        strategy = {k: v for k, v in new["strategy"].items() if k != "optimizer"}
        old = {**common, "strategy": strategy}
        runs = [
            made_up("ewc", seed, [[0.9]]).model_copy(update={"settings": settings})
            for seed, settings in enumerate((old, new))
        ]
        (section,) = sections_of(runs)
        assert [s.seeds for s in section.in_order] == [[0, 1]]

    def test_a_setting_that_became_known_since_and_is_not_set_makes_no_other_section(self):
        stream = {"name": "Made", "n_experiences": 1}
        others = {"limit": None}, {"limit": 3}
        runs = [made_up("covon", 0, [[0.9]], stream=stream)]
        runs += [made_up("vcl", 0, [[0.9]], stream=stream | other) for other in others]
        assert [[s.strategy for s in x.in_order] for x in sections_of(runs)] == [
            ["covon", "vcl"],
            ["vcl"],
        ]

    def test_one_strategy_with_one_seed_on_one_domain(self, tmp_path):
        page = page_of(write_report([made_up("covon", 3, [[0.9]])], tmp_path).parent)
        assert "covon reaches 90.00 % (A_T, mean over domains, 1 seed)." in page.text["p"]
        assert "No test of significance" in page.text["p"]
        assert "BWT" not in page.text["th"]
        (row,) = rows_of(tmp_path / "table.csv")
        assert (row["average_accuracy_std"], row["bwt_mean"]) == ("", "")

    def test_only_a_ceiling(self, tmp_path):
        ceiling = made_up("joint", 0, [None, [0.9, 0.9]], kind="joint")
        page = page_of(write_report([ceiling], tmp_path).parent)
        assert "there is no best strategy" in page.text["p"]
        assert "After 2 domains the ceiling joint has 90.0 %." in page.text["figcaption"]

    def test_tested_on_domains_that_are_never_trained(self, tmp_path):
        rows = [[0.2, 0.4, 0.6], [0.5, 0.7, 0.6]]  # two domains learned, three tested on
        (section,) = sections_of([made_up("covon", 0, rows, held_out=True)])
        (standing,) = section.in_order
        assert [mean for mean, _ in standing.curve] == pytest.approx([0.4, 0.6])  # over all three
        write_report([made_up("covon", 0, rows, held_out=True)], tmp_path)
        assert not (tmp_path / "figures/forgetting.svg").exists()
        assert len(rows_of(tmp_path / "results.csv")) == 6

    def test_as_many_held_out_domains_as_learned_ones_do_not_take_their_names(self):
        stream = {"name": "CORe50", "domains": ["s1", "s2"]}
        rows = [[0.5, 0.5], [0.6, 0.6]]
        for held_out, names in ((True, ["1", "2"]), (False, ["s1", "s2"])):
            run = made_up("covon", 0, rows, held_out=held_out, stream=stream)
            (section,) = sections_of([run])
            assert section.tested == names
            assert section.domains == ["s1", "s2"]

    def test_a_run_that_went_astray_is_neither_best_nor_hidden(self, tmp_path):
        nan = math.nan
        astray = made_up("astray", 0, [[0.9, 0.1], [nan, nan]], calibration={"nll": nan})
        page = page_of(write_report([astray, *comparison()[:3]], tmp_path).parent)
        found = rows_of(tmp_path / "table.csv")
        assert [r["strategy"] for r in found] == ["covon", "buffer", "naive", "astray"]
        assert (found[3]["average_accuracy_mean"], found[3]["nll_mean"]) == ("", "")
        assert "nan" in page.text["td"]
        assert {a["data-value"] for a in page.all("td") if "data-value" in a} > {""}

    def test_different_numbers_of_seeds(self, tmp_path):
        results = [r for r in comparison() if r.strategy != "naive" or r.seed == 1]
        write_report(results, tmp_path)
        seeds = {r["strategy"]: r["seeds"] for r in rows_of(tmp_path / "table.csv")}
        assert seeds == {"joint": "3", "covon": "3", "buffer": "3", "naive": "1"}

    def test_recipes_and_streams_have_sections_of_their_own(self, tmp_path):
        results = [
            made_up("covon", 0, [[0.9]], recipe="one"),
            made_up("covon", 0, [[0.8]], recipe="two"),
            made_up("covon", 0, [[0.7]], recipe="two", stream={"name": "Other"}),
        ]
        page = page_of(write_report(results, tmp_path).parent)
        assert [a["id"] for a in page.all("section")] == ["one", "two", "two-2"]
        assert [a["href"] for a in page.all("a")] == ["#one", "#two", "#two-2"]
        assert (tmp_path / "figures/two-2-curves.svg").exists()
        found = rows_of(tmp_path / "table.csv")
        assert [(r["recipe"], r["stream"]) for r in found] == [
            ("one", "Made"), ("two", "Made"), ("two", "Other"),
        ]  # fmt: skip
        assert (tmp_path / "table.tex").read_text().count(r"\toprule") == 3

    def test_memory_and_losses_are_shown_where_they_are_known(self, tmp_path):
        common = {"experience": 0, "accuracy": 0.5, "images": 10, "seconds": 1.0}
        epochs = [Epoch(epoch=i, loss=loss, **common) for i, loss in enumerate((2.0, 0.5))]
        sampled = {"average_accuracy": 0.75, "nll": 0.5, "brier": 0.25, "ece": 0.125}
        bins = [(0, 0.0, 0.0), (10, 0.75, 0.5), (30, 0.95, 0.9)]
        known = {"reliability": [ReliabilityBin(*b) for b in bins]}
        known |= {"peak_memory": 3 * 2**20, "epochs": epochs, "sampled": sampled}
        runs = [made_up(name, 0, [[0.9]]) for name in ("covon", "naive")]
        runs[0] = runs[0].model_copy(update=known)
        page = page_of(write_report(runs, tmp_path).parent)
        assert "peak MiB" in page.text["th"]
        assert "sampled NLL" in page.text["th"]
        assert "covon is 90.0 % sure and 80.0 % right on average" in page.text["figcaption"]
        assert "75.00" in page.text["td"]
        assert "In the last epoch the training loss of covon is 0.500." in page.text["figcaption"]
        assert rows_of(tmp_path / "table.csv")[0]["peak_memory_bytes"] == "3145728"

    def test_a_strategy_looks_the_same_wherever_it_stands(self):
        found = []
        for a, b in ((0.9, 0.5), (0.5, 0.9)):
            (section,) = sections_of([made_up("a", 0, [[a]]), made_up("b", 0, [[b]])])
            found.append(looks(section.standings))
        assert found[0] == found[1]

    def test_the_colours_have_a_range_where_all_is_right(self):
        (section,) = sections_of([made_up("a", 0, [[1.0, 1.0], [1.0, 1.0]])])
        assert heat_maps.lowest_shown(section) == 90
        texts = heat_maps.matrix_map(section, section.in_order[0]).axes[0].texts
        assert [text.get_text() for text in texts] == ["100"] * 4

    def test_many_strategies_and_domains(self):
        rows = [[0.5] * 50 for _ in range(50)]
        (section,) = sections_of([made_up(f"m{i}", 0, rows) for i in range(20)])
        assert len(set(looks(section.standings).values())) == 20
        image = heat_maps.matrix_map(section, section.in_order[0]).axes[0]
        assert len(image.texts) == 0  # no room for 2,500 numbers
        assert len(image.get_xticks()) <= 10


class TestParts:
    def test_labels_do_not_lie_on_each_other_or_on_points(self):
        points = [(100.0, 100.0 + 3 * i) for i in range(6)]
        sizes = [(40.0, 10.0)] * 6
        centres = place_labels(points, sizes, (0, 0, 300, 300), radius=4)
        boxes = [(x - 20, y - 5, x + 20, y + 5) for x, y in centres]
        for i, a in enumerate(boxes):
            for b in boxes[i + 1 :]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert not any(a[0] < x < a[2] and a[1] < y < a[3] for x, y in points)

    def test_slugs(self):
        assert unique_slugs(["A b", "a-b", "<>", "a b"]) == ["a-b", "a-b-2", "unnamed", "a-b-3"]

    def test_settings_that_differ_and_that_do_not(self):
        results = [
            made_up("a", 0, [[0.9]], own={"lr": 0.1, "schedule": [{"lr": 1.0}], "beta": None}),
            made_up("b", 0, [[0.8]], own={"lr": 0.1, "ess": 5.0}),
            made_up("b", 1, [[0.8]], own={"lr": 0.1, "ess": 6.0}),
        ]
        table = settings_table(sections_of(results)[0])
        assert table.keys == ["schedule", "ess"]
        assert table.rows == [
            ("a", ['[{"lr": 1.0}]', NOTHING]),
            ("b, ess=5.0", [NOTHING, "5"]),
            ("b, ess=6.0", [NOTHING, "6"]),
        ]
        common = dict(table.common)
        assert common == {
            "kind": "covon", "lr": "0.1", "epochs": "3",
            "stream.name": "Made", "stream.n_experiences": "1",
        }  # fmt: skip

    def test_commands_can_be_pasted_into_a_shell(self):
        results = [made_up("it's; rm", s, [[0.9]]) for s in (4, 0)]
        (section,) = sections_of(results)
        command = reproduce.command(section.in_order[0])
        assert command == """covon run r.toml --strategies 'it'"'"'s; rm' --seeds 0,4"""

    @pytest.mark.parametrize(
        ("recipe", "strategy", "changes"),
        [
            ("permuted-digits", "covon", []),
            ("permuted-digits", "finetune", ["epochs=3", "strategies.finetune.lr=0.5"]),
            ("permuted-digits", "finetune", ["stream.n_experiences=2", 'device="mps"']),
            ("permuted-digits", "finetune", ['strategies.finetune.optimizer="sgd"']),
            ("pacs", "finetune", ['model.weights=""']),
            ("domainnet", "covon-paper", ['stream.domains=["clipart", "it\'s"]']),
            ("core50", "covon-authors", ["strategies.covon-authors.schedule=[{lr = 1e-3}, {}]"]),
            ("permuted-digits", "mine", ['strategies.mine={kind = "joint", lr = 0.5}']),
        ],
    )
    def test_commands_make_the_same_run(self, recipe, strategy, changes):
        wanted = settings_of(load_recipe(recipe, changes), strategy)
        run = made_up(strategy, 2, [[0.9]], recipe=recipe).model_copy(update={"settings": wanted})
        (section,) = sections_of([run])
        words = shlex.split(reproduce.command(section.in_order[0]))
        assert words[:7] == ["covon", "run", recipe, "--strategies", strategy, "--seeds", "2"]
        assert words[7::2] == ["--set"] * len(words[7::2])
        assert settings_of(load_recipe(recipe, words[8::2]), strategy) == wanted
        assert len(words[8::2]) == len(changes) or strategy == "mine"

    def test_commands_tell_apart_what_a_file_was_run_with(self, tmp_path):
        """Rows of one section and of others, of the same strategy."""
        text = recipe_text(load_recipe("permuted-digits"), {})
        (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
        file = str(tmp_path / "mine.toml")
        runs = []
        for changes in ([], ["strategies.covon.lr=0.5"], ["strategies.covon.lr=0.5", "epochs=3"]):
            settings = settings_of(load_recipe(file, changes), "covon")
            run = made_up("covon", 0, [[0.9]], recipe="mine")
            runs.append(run.model_copy(update={"settings": settings}))
        runs.append(made_up("finetune", 0, [[0.8]], recipe="mine", kind="finetune"))
        rows = [row for section in sections_of(runs) for row in section.in_order]
        assert len(rows) == 4
        for row in rows[:3]:
            words = shlex.split(reproduce.command(row, rows))
            assert words[:5] == ["covon", "run", "mine.toml", "--strategies", "covon"]
            again = settings_of(load_recipe(file, words[8::2]), "covon")
            assert again == row.runs[0].settings
        page = write_report(runs, tmp_path / "report").read_text(encoding="utf-8")
        commands = re.findall("<code>covon run (.*)</code>", page)
        assert len(set(commands)) == len(commands) == 4

    def test_random_weights_are_said(self):
        runs = []
        for weights in ("", "default"):
            settings = settings_of(load_recipe("pacs", [f"model.weights={weights}"]), "finetune")
            run = made_up("finetune", 0, [[0.9]], recipe="pacs")
            runs.append(run.model_copy(update={"settings": settings}))
        sections = sections_of(runs)
        assert [dict(settings_table(s).common)["model.weights"] for s in sections] == [
            '""',
            "default",
        ]
        assert [s.title.rpartition("(")[2] for s in sections] == [
            'model.weights="")',
            "model.weights=default)",
        ]

    def test_a_run_that_no_setting_makes_of_the_shipped_recipe_is_one_of_a_file(self):
        wanted = settings_of(load_recipe("permuted-digits"), "covon")
        del wanted["strategy"]["later_hess_init"]
        run = made_up("covon", 2, [[0.9]], recipe="permuted-digits")
        run = run.model_copy(update={"settings": wanted})
        (section,) = sections_of([run])
        command = reproduce.command(section.in_order[0])
        assert command == "covon run permuted-digits.toml --strategies covon --seeds 2"
