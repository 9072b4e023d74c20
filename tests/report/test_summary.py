"""Statistics by strategy against numbers by hand; which runs are compared."""

import math

import pytest
from made_up_results import made_up, made_up_comparison

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.result import ReliabilityBin, ResultError
from covon_avalanche.experiment.run_folder import settings_of
from covon_avalanche.report import comparisons, results_frame, strategy_summary
from covon_avalanche.report.summary import (
    forgetting_by_domain,
    holm,
    learning_curve,
    mean_matrix,
    paired_p,
    pooled_reliability,
    unique_slugs,
)


def compared(*results):
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


def test_the_highest_comes_first_and_a_ceiling_is_never_the_best():
    (comparison,) = compared(*made_up_comparison())
    summary = comparison.summary
    assert list(summary.index) == ["joint", "covon", "buffer", "naive"]
    assert list(summary["ceiling"]) == [True, False, False, False]
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


def test_accuracies_by_domain_are_means_over_seeds():
    (comparison,) = compared(*made_up_comparison())
    covon = comparison.runs_of("covon")
    assert mean_matrix(covon)[1] == pytest.approx([0.75, 0.8])
    assert forgetting_by_domain(covon) == pytest.approx([0.15])
    assert learning_curve(covon)["mean"].tolist() == pytest.approx([0.9, 0.775])
    assert learning_curve(comparison.runs_of("joint")).empty


def test_reliability_pools_images():
    bins = [[ReliabilityBin(n, c, a), ReliabilityBin(0, 0, 0)] for n, c, a in
            ((10, 0.75, 0.5), (30, 0.95, 0.9))]  # fmt: skip
    runs = results_frame([made_up("a", i, [[0.9]], reliability=b) for i, b in enumerate(bins)])
    (row,) = pooled_reliability(runs).to_dict("records")
    assert row == pytest.approx({"images": 40, "confidence": 0.9, "accuracy": 0.8})


class TestSignificance:
    def test_the_closed_form_for_three_pairs(self):
        first, second = [0.9, 0.8, 0.85], [0.7, 0.75, 0.7]
        differences = [0.2, 0.05, 0.15]
        mean = sum(differences) / 3
        std = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
        t = mean / (std / math.sqrt(3))
        # Student's t with two degrees of freedom has an elementary distribution function.
        assert paired_p(first, second) == pytest.approx(1 - t / math.sqrt(2 + t * t))

    def test_without_three_pairs_or_spread_there_is_no_test(self):
        assert paired_p([0.9, 0.8], [0.7, 0.75]) is None
        assert paired_p([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) is None
        assert paired_p([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]) == 1.0

    def test_holm_by_hand(self):
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])

    def test_only_common_seeds_are_paired(self):
        best = [made_up("best", s, [[0.9 + s / 100]]) for s in range(5)]
        other = [made_up("other", s, [[0.8 + (s % 3) / 50]]) for s in range(2, 9)]
        few = [made_up("few", s, [[0.7]]) for s in (0, 1, 7, 8)]
        astray = [made_up("astray", s, [[math.nan if s == 4 else 0.5 + s / 9]]) for s in range(5)]
        (comparison,) = compared(*best, *other, *few, *astray)
        common = range(2, 5)
        by_hand = paired_p([0.9 + s / 100 for s in common], [0.8 + (s % 3) / 50 for s in common])
        found = comparison.summary["p_value"].dropna().to_dict()
        assert found == {"other": pytest.approx(by_hand)}


class TestComparisons:
    def test_results_that_cannot_be_compared_are_errors(self):
        with pytest.raises(ValueError, match="at least one result, got none"):
            compared()
        twice = [made_up("covon", 7, [[0.9]]), made_up("covon", 7, [[0.8]])]
        with pytest.raises(ResultError, match="got two of 'covon' in recipe 'r' with seed 7"):
            compared(*twice)
        both, stream = ([[0.9, 0.1], [0.8, 0.8]], [[0.9]]), {"name": "Made"}
        runs = [made_up("covon", seed, rows, stream=stream) for seed, rows in enumerate(both)]
        with pytest.raises(ResultError, match=r"'covon' .* same domains, got \[1, 2\]"):
            compared(*runs)

    def test_a_strategy_has_a_row_for_each_of_its_settings(self):
        own = {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2, "gamma": 0.9}
        runs = [made_up("covon", seed, [[0.9]], own=o) for o in own for seed in (0, 1)]
        (comparison,) = compared(*runs, made_up("vcl", 0, [[0.8]], own={"lr": 0.3}))
        assert comparison.summary["seeds"].to_dict() == {
            "covon, lr=0.1": 2, "covon, lr=0.2": 2, "covon, lr=0.2, gamma=0.9": 2, "vcl": 1,
        }  # fmt: skip

    def test_runs_with_other_common_settings_are_not_compared(self):
        runs = [made_up("covon", 0, [[0.9]]), made_up("vcl", 0, [[0.9]])]
        runs[1].settings["epochs"] = 1
        runs.append(runs[0].model_copy(update={"stream": "valid"}))
        assert [(c.title, list(c.summary.index)) for c in compared(*runs)] == [
            ("title of r (evaluated=test, epochs=3)", ["covon"]),
            ("title of r (evaluated=test, epochs=1)", ["vcl"]),
            ("title of r (evaluated=valid, epochs=3)", ["covon"]),
        ]

    def test_settings_unknown_to_older_versions_have_their_defaults(self):
        new = settings_of(load_recipe("permuted-digits"), "ewc")
        common = {k: v for k, v in new.items() if k not in ("device", "workers", "eval_mb_size")}
        strategy = {k: v for k, v in new["strategy"].items() if k != "optimizer"}
        old = {**common, "strategy": strategy}
        runs = [
            made_up("ewc", seed, [[0.9]]).model_copy(update={"settings": settings})
            for seed, settings in enumerate((old, new))
        ]
        (comparison,) = compared(*runs)
        assert comparison.summary["seeds"].to_dict() == {"ewc": 2}

    def test_a_setting_that_is_none_is_not_set(self):
        stream = {"name": "Made", "n_experiences": 1}
        runs = [made_up("covon", 0, [[0.9]], stream=stream)]
        runs += [made_up("vcl", 0, [[0.9]], stream=stream | {"limit": n}) for n in (None, 3)]
        found = compared(*runs)
        assert [list(c.summary.index) for c in found] == [["covon", "vcl"], ["vcl"]]

    def test_different_seeds_are_noticed_but_not_those_of_a_ceiling(self):
        runs = [made_up("a", seed, [[0.8]]) for seed in range(3)]
        same = [made_up("b", seed, [[0.7]]) for seed in range(3)]
        assert compared(*runs, *same)[0].same_seeds
        assert not compared(*runs, made_up("b", 7, [[0.9]]))[0].same_seeds
        assert compared(*runs, made_up("all", 7, [[0.9]], kind="joint"))[0].same_seeds

    def test_held_out_domains_do_not_take_the_names_of_the_learned_ones(self):
        stream = {"name": "CORe50", "domains": ["s1", "s2"]}
        rows = [[0.5, 0.5], [0.6, 0.6]]
        for held_out, names in ((True, ["1", "2"]), (False, ["s1", "s2"])):
            (comparison,) = compared(made_up("covon", 0, rows, held_out=held_out, stream=stream))
            assert comparison.tested_domains == names
            assert comparison.domains == ["s1", "s2"]

    def test_slugs(self):
        assert unique_slugs(["A b", "a-b", "<>", "a b"]) == ["a-b", "a-b-2", "unnamed", "a-b-3"]
