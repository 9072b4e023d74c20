"""Figures: when there are which, what they say, how they look."""

import math

import pytest
from made_up_results import made_up, made_up_comparison

from covon_avalanche.experiment.result import Epoch, ReliabilityBin
from covon_avalanche.report import comparisons, figures, results_frame


def compared(*results):
    (comparison,) = comparisons(results_frame(results))
    return comparison


def captions(*results):
    return {chart.name: chart.caption for chart in figures.charts_of(compared(*results))}


def test_captions_say_what_the_numbers_say():
    found = captions(*made_up_comparison())
    assert found == {
        "curves": "After 2 domains: highest covon with 77.5 %, lowest naive with 62.5 %; "
        "ceiling joint with 95.0 %.",
        "forgetting": "Mean loss in points: lowest covon with 15.0, highest naive with 55.0 "
        "(up to 55.0 on domain 1).",
        "time": "Training time, seconds: 4.0 for all; the best, covon, with 4.0.",
        "memory": "Memory, in units of the weights: 5.0 for all; the best, covon, with 5.0.",
        "calibration": "Lowest of the continual learners: NLL naive with 0.500, "
        "Brier naive with 0.250, ECE naive with 0.125.",
    }
    matrix = figures.matrix_chart(compared(*made_up_comparison()), "covon")
    assert (
        matrix.caption
        == "After the last domain: lowest domain 1 with 75.0 %, highest 2 with 80.0 %."
    )


def test_losses_and_reliability_are_shown_where_they_are_known():
    common = {"experience": 0, "accuracy": 0.5, "images": 10, "seconds": 1.0}
    epochs = [Epoch(epoch=i, loss=loss, **common) for i, loss in enumerate((20.0, 0.5))]
    bins = [ReliabilityBin(*b) for b in ((0, 0.0, 0.0), (10, 0.75, 0.5), (30, 0.95, 0.9))]
    covon = made_up("covon", 0, [[0.9]], epochs=epochs, reliability=bins)
    found = captions(covon, made_up("naive", 0, [[0.8]]))
    assert found["training"] == "Training loss in the last epoch: covon with 0.500."
    assert "covon has a mean confidence of 90.0 % and an accuracy of 80.0 %" in found["reliability"]
    assert not {"training", "reliability"} & captions(made_up("naive", 0, [[0.8]])).keys()


def test_distances_are_no_probabilities():
    bins = [ReliabilityBin(10, 0.75, 0.5)]
    low, high = ({"nll": x, "brier": x, "ece": x} for x in (0.1, 0.9))
    found = captions(
        made_up("icarl", 0, [[0.9]], kind="icarl", calibration=low, reliability=bins),
        made_up("covon", 0, [[0.8]], calibration=high, reliability=bins),
    )
    assert "NLL covon with 0.900" in found["calibration"]
    assert "covon has a mean confidence of 75.0 %" in found["reliability"]


@pytest.mark.parametrize(
    ("run", "caption"),
    [
        (made_up("joint", 0, [None, [0.9, 0.9]], kind="joint"), "2 domains: ceiling joint with 90"),
        (made_up("covon", 0, [[0.9]]), "After 1 domain: covon with 90.0 %."),
        (made_up("covon", 0, [[0.9, 0.1], [math.nan] * 2]), "No accuracies are known."),
        (made_up("covon", 0, [[0.2, 0.4, 0.6], [0.5, 0.7, 0.6]], held_out=True), "with 60.0 %."),
    ],
)
def test_edges(run, caption, tmp_path):
    """Only a ceiling; one domain; a run that diverged; domains that are never learned."""
    found = captions(run)
    assert caption in found["curves"]
    assert "forgetting" not in found or math.isnan(run.average_accuracy)
    figures.save_matrix(compared(run), run.strategy, tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_a_strategy_looks_the_same_whatever_its_rank():
    found = [
        figures.looks(compared(made_up("a", 0, [[a]]), made_up("b", 0, [[b]])))
        for a, b in ((0.9, 0.5), (0.5, 0.9))
    ]
    assert found[0] == found[1]


def test_the_colours_have_a_range_where_all_is_right():
    comparison = compared(made_up("a", 0, [[1.0, 1.0], [1.0, 1.0]]))
    axes = figures.matrix_chart(comparison, "a").figure.axes[0]
    assert axes.images[0].get_clim() == (90, 100)
    assert [text.get_text() for text in axes.texts] == ["100"] * 4


def test_many_strategies_and_domains():
    comparison = compared(*(made_up(f"m{i}", 0, [[0.5] * 50] * 50) for i in range(20)))
    assert len({str(look) for look in figures.looks(comparison).values()}) == 20
    axes = figures.matrix_chart(comparison, "m0").figure.axes[0]
    assert len(axes.texts) == 0  # no room for 2,500 numbers
    assert len(axes.get_xticks()) <= 10
