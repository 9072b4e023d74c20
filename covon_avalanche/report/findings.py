"""What the figures show, in words: for those who do not see them, and for everyone else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from covon_avalanche.report.charts import CALIBRATION
from covon_avalanche.report.columns import plus_minus
from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Standing, by_accuracy


def headline(section: Section) -> str:
    """The result of the comparison."""
    winner = section.best
    if winner is None:
        return "No continual learner has an accuracy: there is no best strategy."
    accuracy = f"{plus_minus(winner.accuracy, factor=100)} %"
    seeds = f"{len(winner.runs)} seed{'s' if len(winner.runs) > 1 else ''}"
    learners = [s for s in section.in_order if not s.ceiling]
    only = len(learners) == 1
    role = "reaches" if only else "has the highest accuracy of the continual learners:"
    text = f"{winner.strategy} {role} {accuracy} (A_T, mean over domains, {seeds})"
    ceilings = by_accuracy([s for s in section.in_order if s.ceiling])
    if ceilings and not math.isnan(ceilings[0].accuracy[0]):
        gap = 100 * (ceilings[0].accuracy[0] - winner.accuracy[0])
        side = "below" if gap >= 0 else "above"
        text += f", {abs(gap):.2f} points {side} the ceiling {ceilings[0].strategy}"
    text += "."
    if not section.same_seeds:
        text += " The strategies were run with different seeds."
    alone = section.best_without_replay
    if winner.replay and alone is not None:
        accuracy = f"{plus_minus(alone.accuracy, factor=100)} %"
        text += f" It uses replay; the best without is {alone.strategy} with {accuracy}."
    if section.p_values:
        alike = [name for name, p in section.p_values.items() if p >= 0.05]
        text += (
            f" Not significantly different from it (p ≥ 0.05): {_list(alike)}."
            if alike
            else " Its difference to every other that could be tested is significant (p < 0.05)."
        )
    return text


def curves(section: Section) -> str:
    """Who is highest after the last domain, who lowest."""
    drawn = [s for s in by_accuracy(section.in_order) if s.curve and not _unknown(s)]
    count = len(section.domains)
    after = f"After {count} domain{'s' if count > 1 else ''}"
    ceilings = [s for s in section.standings if s.ceiling and not s.curve and not _unknown(s)]
    above = "".join(f"; the ceiling {s.strategy} has {_percent(s)}" for s in ceilings)
    if not drawn:
        return f"{after}{above.lstrip(';')}." if above else "No accuracies are known."
    text = f"{after} {drawn[0].strategy} has {_percent(drawn[0])}"
    if len(drawn) > 1:
        text += f", the highest, and {drawn[-1].strategy} {_percent(drawn[-1])}, the lowest"
    return f"{text}{above}."


def matrix(section: Section, standing: Standing) -> str:
    """The last row, in words."""
    last = standing.matrix[-1]
    if any(math.isnan(cell) for cell in last):
        return "Not all accuracies after the last domain are known."
    worst = min(range(len(last)), key=last.__getitem__)
    best = max(range(len(last)), key=last.__getitem__)
    if worst == best:
        return f"After the last domain {100 * last[0]:.1f} %."
    return (
        f"After the last domain from {100 * last[worst]:.1f} % on domain {section.tested[worst]} "
        f"to {100 * last[best]:.1f} % on domain {section.tested[best]}."
    )


def forgetting(section: Section) -> str:
    """Who forgets least, who most, and where."""
    known = [
        (s.forgetting[0], s)
        for s in section.in_order
        if s.forgetting is not None and not math.isnan(s.forgetting[0])
    ]
    if not known:
        return "No forgetting is known."
    known.sort(key=lambda pair: pair[0])
    least, most = known[0], known[-1]
    if len(known) == 1:
        text = f"{least[1].strategy} loses {100 * least[0]:.1f} points on average"
    else:
        text = (
            f"{least[1].strategy} loses least, {100 * least[0]:.1f} points on average, and "
            f"{most[1].strategy} most, {100 * most[0]:.1f}"
        )
    drops = most[1].forgetting_by_domain or []
    where = max(range(len(drops)), key=drops.__getitem__)
    return f"{text} (up to {100 * drops[where]:.1f} on domain {section.domains[where]})."


def price(section: Section, cost: Callable[[Standing], float], unit: str) -> str:
    """Who is cheapest, and what the best one costs."""
    cheapest = min(section.in_order, key=cost)
    text = f"{cheapest.strategy} takes least, {_cost(cost(cheapest))} {unit}"
    winner = section.best
    if winner is not None and winner is not cheapest:
        text += f"; the best, {winner.strategy}, takes {_cost(cost(winner))}"
    return f"{text}."


def calibration(section: Section) -> str:
    """The lowest of each measure."""
    parts = []
    for name, label in CALIBRATION.items():
        known = []
        for standing in section.in_order:
            value = standing.calibration(name)
            if value is not None and not standing.ceiling and math.isfinite(value[0]):
                known.append((value[0], standing.strategy))
        if known:
            lowest, strategy = min(known)
            parts.append(f"{label.split()[0]} {strategy} with {lowest:.3f}")
    return f"Lowest of the continual learners: {_list(parts)}." if parts else "Of ceilings only."


def reliability(section: Section) -> str:
    """How sure and how right the best, or else the first, of the strategies is."""
    shown = [s for s in section.in_order if s.reliability]
    standing = section.best if section.best in shown else shown[0]
    images = sum(b.images for b in standing.reliability)
    confidence = sum(b.images * b.confidence for b in standing.reliability) / images
    accuracy = sum(b.images * b.accuracy for b in standing.reliability) / images
    return (
        f"{standing.strategy} is {100 * confidence:.1f} % sure and {100 * accuracy:.1f} % right on "
        "average; points below the diagonal are predictions that are too sure."
    )


def training(section: Section) -> str:
    """Losses in the last epoch."""
    known = [(s.losses[-1], s.strategy) for s in section.standings if s.losses]
    low, high = min(known), max(known)
    text = f"In the last epoch the training loss of {low[1]} is {low[0]:.3f}"
    if len(known) > 1:
        text += f", the lowest, and that of {high[1]} {high[0]:.3f}, the highest"
    return f"{text}."


def _unknown(standing: Standing) -> bool:
    return math.isnan(standing.accuracy[0])


def _percent(standing: Standing) -> str:
    return f"{100 * standing.accuracy[0]:.1f} %"


def _cost(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _list(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
