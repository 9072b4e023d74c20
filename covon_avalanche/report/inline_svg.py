"""A figure as part of the page: in the page's colours, light or dark, with words beside it."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from covon_avalanche.report.canvas import COLOURS, FAINT, INK, Picture

_PAGE_COLOURS = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
}


def inline_svg(picture: Picture, title: str) -> Markup:
    """The ``<svg>`` element alone, named for screen readers.

    :param title: of the figure; the words read out are the title and the finding.
    """
    svg = picture.svg[picture.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # The sheet is for the whole document; the page's own says the same for figures only.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    opening, body = svg.split(">", 1)
    found = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"', opening)
    if found is None:
        raise ValueError(f"an SVG must have a viewBox, got {opening!r}")
    for colour, name in _PAGE_COLOURS.items():
        body = body.replace(colour, name)
    words = escape(f"{title}. {picture.finding}")
    head = (
        f'<svg {found.group(0)} width="{found.group(1)}" height="{found.group(2)}" '
        f'role="img" aria-label="{words}">\n<title>{escape(title)}</title>'
    )
    return Markup(head + body)
