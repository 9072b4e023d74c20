"""Which figures a section has."""

from __future__ import annotations

import math

from covon_avalanche.report import charts, findings, heat_maps
from covon_avalanche.report.canvas import Picture, picture, style
from covon_avalanche.report.section import Section, unique_slugs


def pictures_of(section: Section, prefix: str = "") -> list[Picture]:
    """Accuracy over domains, forgetting, its price, calibration and training, where known.

    :param prefix: of the files' names.
    """
    found = []
    with style():

        def add(name: str, title: str, finding: str, figure: charts.Figure) -> None:
            found.append(picture(figure, f"{prefix}{name}", title, finding))

        add(
            "curves",
            "Average accuracy over domains learned",
            findings.curves(section),
            charts.accuracy_curves(section),
        )
        if any(s.forgetting_by_domain for s in section.in_order):
            add(
                "forgetting",
                "Accuracy lost since a domain was learned",
                findings.forgetting(section),
                heat_maps.forgetting_map(section),
            )
        if not all(math.isnan(s.accuracy[0]) for s in section.in_order):
            add(
                "time",
                "Accuracy against training time",
                findings.price(section, lambda s: s.seconds[0], "seconds"),
                charts.accuracy_against(section, lambda s: s.seconds[0], "seconds of a run"),
            )
            add(
                "memory",
                "Accuracy against memory",
                findings.price(section, lambda s: s.parameters_worth, "times the weights"),
                charts.accuracy_against(
                    section, lambda s: s.parameters_worth, "memory, in units of the weights"
                ),
            )
        if any(s.calibration(name) for s in section.in_order for name in charts.CALIBRATION):
            add(
                "calibration",
                "Calibration after the last domain (lower is better)",
                findings.calibration(section),
                charts.calibration_bars(section),
            )
        if any(s.reliability for s in section.in_order):
            add(
                "reliability",
                "Accuracy by confidence after the last domain",
                findings.reliability(section),
                charts.reliability_diagram(section),
            )
        if any(s.losses for s in section.in_order):
            add(
                "training",
                "Training loss",
                findings.training(section),
                charts.training_curves(section),
            )
    return found


def matrices_of(section: Section, prefix: str = "") -> list[Picture]:
    """The accuracy matrix of each strategy, in the order of the table."""
    slugs = unique_slugs([standing.strategy for standing in section.standings])
    with style():
        return [
            picture(
                heat_maps.matrix_map(section, standing),
                f"{prefix}matrix-{slug}",
                standing.strategy,
                findings.matrix(section, standing),
            )
            for slug, standing in zip(slugs, section.standings, strict=True)
        ]
