"""The columns of the summary table, the same in HTML, Markdown and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Spread, Standing

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """One of the table's measures.

    :param heading: in plain text.
    :param latex: the heading in LaTeX.
    :param meaning: one sentence for the legend.
    :param text: what the cell shows.
    :param value: what the cell is sorted by; ``None`` comes last.
    """

    heading: str
    latex: str
    meaning: str
    text: Callable[[Section, Standing], str]
    value: Callable[[Section, Standing], float | None]


def plus_minus(value: Spread | None, digits: int = 2, factor: float = 1.0) -> str:
    """``85.00 ± 7.07``; the mean alone for one seed."""
    if value is None:
        return NOTHING
    mean, std = (factor * number for number in value)
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def seconds(value: float) -> str:
    """Two digits or more; no unit."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def mebibytes(value: int | None) -> str:
    """No unit."""
    return NOTHING if value is None else f"{value / 2**20:.0f}"


def p_value(section: Section, standing: Standing) -> str:
    """The corrected p-value, or ``best``."""
    if standing is section.best:
        return "best"
    p = section.p_values.get(standing.strategy)
    return NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def marks(standing: Standing) -> list[str]:
    """What has to be known about a strategy before it is compared."""
    return ["ceiling"] * standing.ceiling + ["replay"] * standing.replay


def _measure(
    heading: str,
    latex: str,
    meaning: str,
    measure: Callable[[Standing], Spread | None],
    digits: int = 2,
    factor: float = 1.0,
) -> Column:
    def value(_: Section, standing: Standing) -> float | None:
        found = measure(standing)
        return None if found is None else found[0]

    def text(_: Section, standing: Standing) -> str:
        return plus_minus(measure(standing), digits, factor)

    return Column(heading, latex, meaning, text, value)


ACCURACY = _measure(
    "A_T %",
    r"$A_T$ (\%)",
    "accuracy after the last domain, mean over domains",
    lambda s: s.accuracy,
    factor=100,
)
COLUMNS = (
    ACCURACY,
    Column(
        "p",
        "$p$",
        "probability of such a difference to the best strategy by the luck of the seeds",
        p_value,
        lambda section, s: section.p_values.get(s.strategy),
    ),
    _measure(
        "by image %",
        r"by image (\%)",
        "accuracy after the last domain, every image counting the same",
        lambda s: s.weighted_accuracy,
        factor=100,
    ),
    _measure(
        "BWT %",
        r"BWT (\%)",
        "backward transfer: mean change of a past domain's accuracy since it was learned",
        lambda s: s.bwt,
        factor=100,
    ),
    _measure(
        "forgetting %",
        r"forgetting (\%)",
        "minus the backward transfer; lower is better",
        lambda s: s.forgetting,
        factor=100,
    ),
    _measure(
        "NLL",
        "NLL",
        "negative log-likelihood of the true class in nats; lower is better",
        lambda s: s.calibration("nll"),
        digits=3,
    ),
    _measure(
        "ECE",
        "ECE",
        "expected calibration error, in [0, 1]; lower is better",
        lambda s: s.calibration("ece"),
        digits=3,
    ),
    _measure(
        "sampled A_T %",
        r"sampled $A_T$ (\%)",
        "A_T with the mean of several posterior samples' predictions instead of the mean weights'",
        lambda s: s.sampled("average_accuracy"),
        factor=100,
    ),
    _measure(
        "sampled NLL",
        "sampled NLL",
        "NLL of these predictions",
        lambda s: s.sampled("nll"),
        digits=3,
    ),
    _measure(
        "sampled ECE",
        "sampled ECE",
        "ECE of these predictions",
        lambda s: s.sampled("ece"),
        digits=3,
    ),
    Column(
        "seconds",
        "seconds",
        "wall-clock training time of one run",
        lambda _, s: seconds(s.seconds[0]),
        lambda _, s: s.seconds[0],
    ),
    Column(
        "memory",
        "memory",
        "weights, optimizer state, anchors and stored examples, in units of the weights",
        lambda _, s: f"{s.parameters_worth:.1f}",
        lambda _, s: s.parameters_worth,
    ),
    Column(
        "peak MiB",
        "peak MiB",
        "largest memory of a run",
        lambda _, s: mebibytes(s.peak_memory),
        lambda _, s: s.peak_memory,
    ),
    Column(
        "seeds",
        "seeds",
        "number of runs",
        lambda _, s: str(len(s.runs)),
        lambda _, s: len(s.runs),
    ),
)


BRIEF = ("A_T %", "BWT %", "seconds", "memory", "seeds")
"""What fits into a terminal."""


def brief_columns(section: Section) -> list[Column]:
    """The most important ones."""
    return [column for column in columns_of(section) if column.heading in BRIEF]


def columns_of(section: Section) -> list[Column]:
    """Those in which at least one strategy has a number."""
    return [c for c in COLUMNS if any(c.value(section, s) is not None for s in section.in_order)]
