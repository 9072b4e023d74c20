"""When there are which figures, and how they look."""

import math
from itertools import pairwise

import pytest
from made_up_results import compared, made_up, made_up_comparison

from covon_avalanche.report import figures


def drawn(*results, only=()):
    """The axes of each figure, or of some, by name."""
    found = figures.figures_of(compared(*results), *only)
    return {name: figure.axes for name, figure in found.items()}


def points(axes):
    """The y by x of each line with a label."""
    handles, labels = axes.get_legend_handles_labels()
    return {name: dict(line.get_xydata()) for name, line in zip(labels, handles, strict=True)}


def numbers(axes):
    return [text.get_text() for text in axes.texts]


def test_figures_show_the_numbers():
    found = drawn(*made_up_comparison())
    assert set(found) == {
        *("curves", "forgetting", "time", "memory", "calibration"),
        *("matrix-joint", "matrix-covon", "matrix-buffer", "matrix-naive"),
    }
    curves = points(found["curves"][0])
    assert curves["covon"] == pytest.approx({1: 90, 2: 77.5})
    assert curves["joint"] == pytest.approx({1: 95, 2: 95})
    assert numbers(found["forgetting"][0]) == ["15", "30", "55"]
    assert numbers(found["matrix-covon"][0]) == ["90", "10", "75", "80"]
    assert [bar.get_width() for bar in found["calibration"][1].patches] == [0.25] * 4
    assert found["time"][0].get_xlabel() == "training time, seconds"


def test_distances_are_no_probabilities():
    found = drawn(made_up("icarl", 0, [[0.9]], kind="icarl"), made_up("covon", 0, [[0.8]]))
    assert len(found["calibration"][0].patches) == 1


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        (made_up("joint", 0, [None, [0.9, 0.9]], kind="joint"), {"forgetting"}),
        (made_up("covon", 0, [[0.9]]), {"forgetting"}),
        (
            made_up("covon", 0, [[0.9, 0.1], [math.nan] * 2], calibration={}),
            {"forgetting", "time", "memory", "calibration"},
        ),
        (made_up("covon", 0, [[0.2, 0.4, 0.6], [0.5, 0.7, 0.6]], held_out=True), {"forgetting"}),
    ],
)
def test_edges(run, missing, tmp_path):
    """Only offline training; one domain; a run that diverged; domains that are never learned."""
    every = {"curves", "forgetting", "time", "memory", "calibration", f"matrix-{run.strategy}"}
    assert drawn(run).keys() == every - missing
    figures.save(compared(run), f"matrix-{run.strategy}", tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    figures.save(compared(run), "forgetting", tmp_path / "forgetting.png")
    assert (tmp_path / "forgetting.png").exists() == ("forgetting" not in missing)


def test_a_strategy_looks_the_same_whatever_its_rank():
    found = [
        figures.line_styles(compared(made_up("a", 0, [[a]]), made_up("b", 0, [[b]])))["a"]
        for a, b in ((0.9, 0.5), (0.5, 0.9))
    ]
    assert found[0] | {"lw": 0} == found[1] | {"lw": 0}


def test_long_names_that_differ_in_the_middle_stay_apart():
    names = ("finetune-regmean-adapter", "finetune-kfac-adapter", "a-name-without-another-like-it")
    found = drawn(*(made_up(name, 0, [[0.9, 0.1], [0.8, 0.7]]) for name in names))
    short = {"finetune-r…n-adapter", "finetune-k…c-adapter", "a-name-w…like-it"}
    for axes in (found["curves"][0], found["time"][0]):
        assert set(axes.get_legend_handles_labels()[1]) == short
    for axes in (found["forgetting"][0], found["calibration"][0]):
        assert {label.get_text() for label in axes.get_yticklabels()} == short


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("domain", ["art_painting", "north-of-the-equator", "a-b"])
def test_long_names_leave_room_for_the_numbers(domain):
    stream = {"name": "Made", "domains": [domain, domain[::-1]]}
    runs = [made_up(n * 9, 0, [None, [0.9, 0.8]], kind="joint", stream=stream) for n in "ab"]
    figure = figures.figures_of(compared(*runs), f"matrix-{'a' * 9}")[f"matrix-{'a' * 9}"]
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.get_window_extent().height > 0.4 * figure.dpi
    for part in (axes, *figure.axes[1:]):
        box = part.get_tightbbox()
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.y1


def test_the_numbers_at_an_axis_do_not_touch():
    runs = [made_up("a" * 20, 0, [[0.9]], calibration={"nll": 1, "brier": 0.6, "ece": 0.25})]
    with figures.style():
        figure = figures.figures_of(compared(*runs), "calibration")["calibration"]
        figure.draw_without_rendering()
    shown = [
        label.get_window_extent()
        for axes in figure.axes
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if tick <= axes.get_xlim()[1]
    ]
    assert len(shown) >= 6
    assert all(a.x1 < b.x0 for a, b in pairwise(shown))


def test_the_colours_have_the_range_of_the_data():
    axes = drawn(made_up("a", 0, [[1.0, 1.0], [1.0, 1.0]]))["matrix-a"][0]
    assert axes.images[0].get_clim() == (90, 100)
    assert numbers(axes) == ["100"] * 4
    axes, bar = drawn(made_up("a", 0, [[0.9, 0.1], [0.3, 0.8]]))["forgetting"]
    assert axes.images[0].get_clim() == pytest.approx((-60, 60))  # white is nothing lost
    assert bar.get_ylim() == pytest.approx((0, 60))
    axes, bar = drawn(made_up("a", 0, [[0.5, 0.1], [0.7, 0.8]]))["forgetting"]
    assert bar.get_ylim() == pytest.approx((-20, 1))
    axes, _ = drawn(made_up("a", 0, [[0.5, 0.1], [0.503, 0.8]]))["forgetting"]
    assert numbers(axes) == ["0"]  # not -0


def test_joint_training_has_a_row_for_its_one_evaluation():
    joint = made_up("joint", 0, [None, None, [0.9, 0.8, 0.7]], kind="joint")
    axes = drawn(joint)["matrix-joint"][0]
    assert axes.images[0].get_array().shape == (1, 3)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["3"]


def test_many_strategies_look_different_and_many_domains_have_room():
    runs = [made_up(f"strategy-{i}", 0, [[0.5] * 50] * 50) for i in range(20)]
    looks = figures.line_styles(compared(*runs)).values()
    assert len({str(look) for look in looks}) == 20
    assert len({look["color"] for look in looks}) >= 17
    found = drawn(*runs, only=("curves", "forgetting", "matrix-strategy-0"))
    assert len(found["forgetting"][0].get_yticks()) == 20
    matrix = found["matrix-strategy-0"][0]
    assert numbers(matrix) == []  # no room for 2,500 numbers
    assert len(matrix.get_xticks()) <= 10
