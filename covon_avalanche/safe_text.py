"""Text from recipes, results and file names, made harmless for terminals and spreadsheets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

if TYPE_CHECKING:
    import pandas as pd


def in_utf8(text: str) -> str:
    """The text with escapes for bytes of a file name that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """The text on one line, without control characters, which could rewrite the screen."""
    return " ".join("".join(c if c.isprintable() else " " for c in in_utf8(text)).split())


Printable = Annotated[str, AfterValidator(printable)]


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that cannot be printed")
    return text


PrintableName = Annotated[str, AfterValidator(_check_printable)]
"""A name that must stay as it is, such as a folder's."""


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV without its index. Text that spreadsheets would take for a formula begins
    with an apostrophe."""

    def neutral(cell: Any) -> Any:
        formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{cell}" if formula else cell

    return str(table.map(neutral).rename(columns=neutral).to_csv(index=False))


ESCAPE = r"^'(?=[=+\-@\t\r])"
"""A regular expression that finds the apostrophes of :func:`csv_text`."""
