"""Statistics by strategy against numbers by hand; which runs are compared."""

import math
import re

import pandas as pd
import pytest
from made_up_results import compared, made_up, made_up_comparison

from covon_avalanche.experiment.result import Epoch, ResultError
from covon_avalanche.report import comparisons, results_frame, strategy_summary
from covon_avalanche.report.tables import MISSING, summary_table

INF = math.inf


def split(*results):
    return comparisons(results_frame(results))


def test_means_and_deviations_by_hand():
    covon = strategy_summary(results_frame(made_up_comparison())).loc["covon"]
    # A_T of the seeds: 0.8, 0.75, 0.775; weighted 0.8, 0.725, 0.7625.
    assert covon["average_accuracy_mean"] == pytest.approx(0.775)
    assert covon["average_accuracy_std"] == pytest.approx(0.025)
    assert covon["weighted_accuracy_mean"] == pytest.approx(0.7625)
    assert covon["bwt_mean"] == pytest.approx(-0.15)
    assert covon["bwt_std"] == pytest.approx(0.05)
    assert covon["forgetting_mean"] == pytest.approx(0.15)
    assert (covon["nll_mean"], covon["train_seconds_mean"]) == (0.5, 4.0)
    assert (covon["memory_ratio"], covon["seeds"]) == (5.0, 3)
    assert math.isnan(covon["peak_memory"])


def test_time_and_memory_grow_from_the_second_domain_to_the_last():
    eye = [[float(i == j) for i in range(4)] for j in range(4)]
    times, kept = [9.0, 2.0, 3.0, 5.0], [1.0, 2.0, 2.0, 3.0]
    runs = [made_up("a", s, eye, memory_by_domain=kept) for s in (0, 1)]
    runs[0].train_seconds = times
    runs[1].train_seconds = [9.0, 2.0, 3.0, 3.0]
    runs.append(made_up("older", 0, eye))
    summary = strategy_summary(results_frame(runs))
    assert summary["time_growth_mean"].to_dict() == {"a": 2.0, "older": 1.0}
    assert summary.loc["a", "memory_growth_mean"] == 1.5
    table = summary_table(compared(*runs), ["time growth", "memory growth"])
    assert table.loc[0].tolist()[1:] == ["2.0", "1.5"]
    assert table.loc[1].tolist()[1:] == ["1.0", MISSING]
    short = results_frame([made_up("b", 0, [[0.9, 0.1], [0.8, 0.8]], memory_by_domain=[1.0, 2.0])])
    assert short[["time_growth", "memory_growth"]].isna().all(axis=None)


def test_the_highest_comes_first_and_offline_training_is_never_the_best():
    comparison = compared(*made_up_comparison())
    summary = comparison.summary
    assert list(summary.index) == ["joint", "covon", "buffer", "naive"]
    assert list(summary["offline"]) == [True, False, False, False]
    assert list(summary["replay"]) == [False, False, True, False]
    assert list(summary["best"]) == [False, True, False, False]
    assert comparison.best == "covon"
    assert summary.loc["joint", ["bwt_mean", "p_value"]].isna().all()


def test_a_mean_over_some_of_the_seeds_is_not_shown_as_one_over_all():
    nan = math.nan
    runs = [made_up("a", 0, [[0.9]]), made_up("a", 1, [[nan]], calibration={"nll": nan})]
    row = strategy_summary(results_frame([*runs, made_up("b", 0, [[0.1]])])).loc["a"]
    assert row[["average_accuracy_mean", "nll_mean"]].isna().all()
    assert not row["best"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_mean_of_an_infinite_nll_is_infinite_without_a_deviation():
    runs = [made_up("a", s, [[0.5]], calibration={"nll": nll}) for s, nll in enumerate((0.5, INF))]
    comparison = compared(*runs)
    row = comparison.summary.loc["a"]
    assert row["nll_mean"] == INF
    assert math.isnan(row["nll_std"])
    assert list(summary_table(comparison, ["NLL"])["NLL"]) == ["inf"]


def p_values(**accuracies):
    """The p-value of each strategy against the best, by its accuracies with the seeds from 0."""
    runs = [made_up(n, s, [[a]]) for n, found in accuracies.items() for s, a in enumerate(found)]
    return strategy_summary(results_frame(runs))["p_value"].dropna().to_dict()


def closed_form(first, second):
    """Student's t with two degrees of freedom has an elementary distribution function."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = sum(differences) / 3
    t = mean / math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    return 1 - t / math.sqrt(2 + t * t)


class TestSignificance:
    best = (0.9, 0.8, 0.85)

    def test_holm_corrects_for_the_number_of_strategies(self):
        far, near = (0.1, 0.05, 0.1), (0.7, 0.75, 0.7)
        assert p_values(best=self.best, near=near, far=far) == pytest.approx(
            {"far": 2 * closed_form(self.best, far), "near": closed_form(self.best, near)}
        )

    def test_without_three_pairs_or_spread_there_is_no_test(self):
        assert p_values(best=(0.9, 0.8), few=(0.7, 0.75)) == {}
        assert p_values(best=self.best, shifted=(0.8, 0.7, 0.75), same=self.best) == {}

    def test_a_lucky_seed_is_not_what_others_are_compared_with(self):
        others = {"near": (0.7, 0.75, 0.7), "best": self.best}
        assert p_values(lucky=(0.99,), **others) == p_values(**others) != {}
        assert compared(made_up("few", 0, [[0.9]]), made_up("less", 0, [[0.8]])).best == "few"

    def test_only_common_seeds_are_paired(self):
        best = {s: 0.9 + s / 100 for s in range(5)}
        other = {s: 0.8 + (s % 3) / 50 for s in range(2, 9)}
        astray = {s: math.nan if s == 4 else 0.5 + s / 9 for s in range(5)}
        found = {"best": best, "other": other, "few": {0: 0.7, 7: 0.7}, "astray": astray}
        runs = [made_up(name, s, [[a]]) for name, runs in found.items() for s, a in runs.items()]
        by_hand = closed_form([best[s] for s in (2, 3, 4)], [other[s] for s in (2, 3, 4)])
        summary = strategy_summary(results_frame(runs))
        assert summary["p_value"].dropna().to_dict() == pytest.approx({"other": by_hand})
        assert summary["difference"].dropna().index.tolist() == ["other"]

    def test_the_interval_of_a_paired_difference(self):
        """The 97.5 % quantile of Student's t with two degrees of freedom is 4.302653."""
        other = (0.6, 0.7, 0.55)  # differences -0.3, -0.1, -0.3
        runs = [made_up("best", s, [[a]]) for s, a in enumerate(self.best)]
        runs += [made_up("other", s, [[a]]) for s, a in enumerate(other)]
        comparison = compared(*runs)
        row = comparison.summary.loc["other"]
        half = 4.302653 * math.sqrt((2 * (0.2 / 3) ** 2 + (0.4 / 3) ** 2) / 2 / 3)
        assert row["difference"] == pytest.approx(-0.7 / 3)
        assert row["difference_ci95"] == pytest.approx(half)
        shown = [MISSING, f"{-70 / 3:.2f} ± {100 * half:.2f}"]
        assert summary_table(comparison)["difference %"].tolist() == shown


class TestComparisons:
    def test_results_that_cannot_be_compared_are_errors(self):
        with pytest.raises(ValueError, match="at least one result, got none"):
            comparisons(pd.DataFrame())
        twice = [made_up("covon", 7, [[0.9]]), made_up("covon", 7, [[0.8]])]
        with pytest.raises(ResultError, match="got two of 'covon' in recipe 'r' with seed 7"):
            split(*twice)

    @pytest.mark.parametrize("other", ["covon", "vcl"])
    def test_runs_with_other_numbers_of_domains_are_an_error(self, other):
        stream = {"name": "DomainFolders"}  # whose folder has changed in between
        runs = [made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]], stream=stream)]
        runs += [made_up(other, 1, [[0.9]], stream=stream)]
        with pytest.raises(ResultError, match="have the same domains, got 2 and 1 in recipe 'r'"):
            split(*runs)
        rows = [[[0.9, 0.1]] * 3, [[0.9, 0.1]] * 4]  # tested on two domains that are not learned
        held_out = {"held_out": True, "stream": stream}
        runs = [made_up(other, i, rows[i], **held_out) for i in range(2)]
        with pytest.raises(ResultError, match="must have the same domains, got 3 and 4"):
            split(*runs)

    def test_a_strategy_has_a_row_for_each_of_its_settings(self):
        own = {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2, "gamma": 0.9}
        runs = [made_up("covon", seed, [[0.9]], own=o) for o in own for seed in (0, 1)]
        comparison = compared(*runs, made_up("vcl", 0, [[0.8]], own={"lr": 0.3}))
        seeds = comparison.summary["seeds"].to_dict()
        assert seeds.pop("vcl") == 1
        assert list(seeds.values()) == [2, 2, 2]
        assert all(re.fullmatch("covon-[0-9a-f]{6}", label) for label in seeds)

    def test_runs_with_other_common_settings_are_not_compared(self):
        runs = [made_up("covon", 0, [[0.9]]), made_up("vcl", 0, [[0.9]])]
        runs[1].settings["epochs"] = 1
        runs.append(runs[0].model_copy(update={"stream": "valid"}))
        runs[1].settings["workers"] = 3  # no number depends on it
        found = split(*runs)
        assert [list(c.summary.index) for c in found] == [["covon"], ["vcl"], ["covon"]]
        assert len({c.name for c in found}) == 3
        differ = "epochs 3, evaluated test", "epochs 1, evaluated test", "epochs 3, evaluated valid"
        assert [c.title for c in found] == [f"title of r ({text})" for text in differ]

    def test_runs_that_differ_in_what_has_no_effect_are_compared(self):
        runs = [made_up("covon", seed, [[0.9]]) for seed in range(3)]
        for seed, run in enumerate(runs):
            run.settings |= {"workers": seed, "eval_mb_size": 100 + seed}
        (comparison,) = split(*runs)
        assert comparison.title == "title of r"
        assert comparison.summary["seeds"].to_dict() == {"covon": 3}

    def test_different_seeds_are_noticed_but_not_those_of_offline_training(self):
        runs = [made_up("a", seed, [[0.8]]) for seed in range(3)]
        same = [made_up("b", seed, [[0.7]]) for seed in range(3)]
        assert compared(*runs, *same).same_seeds
        assert not compared(*runs, made_up("b", 7, [[0.9]])).same_seeds
        assert compared(*runs, made_up("all", 7, [[0.9]], kind="joint")).same_seeds

    def test_held_out_domains_do_not_take_the_names_of_the_learned_ones(self):
        stream = {"name": "CORe50", "domains": ["s1", "s2"]}
        rows = [[0.5, 0.5], [0.6, 0.6]]
        for held_out, names in ((True, ["1", "2"]), (False, ["s1", "s2"])):
            comparison = compared(made_up("covon", 0, rows, held_out=held_out, stream=stream))
            assert comparison.tested_domains == names
            assert comparison.domains == ["s1", "s2"]


def remarks_of(*runs, **searched):
    for run in runs:
        run.settings["searched"] = searched
    return compared(*runs).remarks


def test_unequal_searches_and_values_at_an_end_are_remarked_upon():
    runs = [made_up(name, 0, [[0.9]]) for name in ("a", "b", "c")]
    same = {"trials": 20, "accuracy": 0.9}
    assert remarks_of(*runs, a=same, b=same, c={"trials": 0}) == []
    extended = {"trials": 22, "extensions": 2}
    assert remarks_of(*runs, a=same, b=extended, c={"trials": 0}) == []
    found = remarks_of(*runs, a=same, b={"trials": 8, "at_end": ["lr", "gamma"]}, c={"trials": 0})
    budgets, ends = found
    assert budgets == "Searches had different numbers of trials: a 20, b 8."
    assert ends.startswith("Best value at an end of what the search tried: b (lr, gamma). A wider")


def test_runs_with_other_test_data_are_remarked_upon():
    three, four = (dict.fromkeys(names, 0.9) for names in ("abc", "abcd"))
    old = made_up("a", 0, [[0.9]], counts=[9], class_accuracy=three)
    same = made_up("a", 3, [[0.8]], counts=[9], class_accuracy=three)
    before_names = made_up("a", 2, [[0.8]], counts=[9])
    assert remarks_of(before_names, old, same) == []
    for new in (
        made_up("a", 1, [[0.8]], counts=[12], class_accuracy=three),
        made_up("a", 1, [[0.8]], counts=[9], class_accuracy=four),
    ):
        (found,) = remarks_of(old, same, new)
        assert "9 images (a with seed 0, for example)" in found
        also = ", also of d" if "d" in new.class_accuracy else ""
        assert f"{sum(new.counts)} images{also} (a with seed 1" in found
    moved = [made_up("a", i, [[0.9] * 2] * 2, counts=[10 + i, 20 - i]) for i in range(2)]
    (found,) = remarks_of(*moved)
    assert "on 10 + 20 images (a with seed 0, for example); 11 + 19 images (a" in found


def test_runs_of_several_versions_are_remarked_upon():
    runs = [made_up("a", s, [[0.9]], versions={"covon_avalanche": f"1.{s}"}) for s in range(2)]
    assert remarks_of(runs[0]) == []
    (remark,) = remarks_of(*runs)
    assert remark.startswith("Runs are of versions 1.0 and 1.1 of covon_avalanche")


@pytest.mark.parametrize(
    ("losses", "falling"),
    [
        ([2, 1.5, 1.2, 1, 0.8], True),  # 0.2 of 1.2 in the last fifth
        ([2, 0.5, 0.3, 0.25, 0.24], False),
        ([2, 1, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1], False),
        ([2, 1], False),  # one difference tells nothing
        ([2], False),
        ([1, 2, 3], False),
    ],
)
def test_losses_that_still_fall_are_remarked_upon(losses, falling):
    epochs = [
        Epoch(experience=d, epoch=i, loss=loss, accuracy=0.5, images=10, seconds=1.0)
        for d in range(2)
        for i, loss in enumerate(losses)
    ]
    found = remarks_of(made_up("a", 0, [[0.9]], epochs=epochs), made_up("b", 0, [[0.8]]))
    assert [remark.partition(". ")[0] for remark in found] == falling * [
        "Training loss still falling at the end of a domain: a"
    ]


def test_strategies_below_fine_tuning_by_more_than_the_spread_are_remarked_upon():
    scores = {"plain": (0.70, 0.72), "merged": (0.9, 0.9), "good": (0.8, 0.8), "near": (0.7, 0.6)}
    scores |= {"bad": (0.6, 0.61), "ridge": (0.5, 0.51)}
    kinds = {"plain": "finetune", "merged": "finetune", "ridge": "ridge"}
    runs = {
        (name, seed): made_up(name, seed, [[score]], kind=kinds.get(name, "covon"))
        for name, own in scores.items()
        for seed, score in enumerate(own)
    }
    for (name, _), run in runs.items():
        if name != "ridge":  # there is nothing to search
            run.settings["strategy"]["lr"] = 0.1
        if name == "merged":
            run.settings["strategy"]["merge"] = {"rule": "regmean"}
    (found,) = remarks_of(*runs.values())
    assert found.startswith("Below fine-tuning: bad. Search their settings, or for CoVON take")
    for seed in (0, 1):
        runs["bad", seed].settings["strategy"]["noise"] = 0.02  # as presets do
    (found,) = remarks_of(*runs.values())
    assert found.startswith("Below fine-tuning: bad. Search their settings (docs")
    assert remarks_of(*(run for (_, seed), run in runs.items() if seed == 0)) == []
