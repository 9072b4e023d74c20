"""Untrusted text on terminals and in spreadsheets."""

import os

import pandas as pd
import pytest
from pydantic import TypeAdapter, ValidationError

from covon_avalanche.safe_text import PrintableName, csv_text, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Permuted digits", "Permuted digits"),
        ("a\x1b[31mb\x07", "a [31mb"),
        ("two\r\nlines\t", "two lines"),
        ("evil\u202egpj.exe", "evil gpj.exe"),  # right to left
        ("größer \u2265 \u7248", "größer \u2265 \u7248"),
        (os.fsdecode(b"dog\xff.jpg"), r"dog\udcff.jpg"),
    ],
)
def test_text_is_printable(text, shown):
    assert printable(text) == shown
    assert printable(text).encode()


def test_names_stay_as_they_are_or_are_refused():
    names = TypeAdapter(PrintableName)
    assert names.validate_python("line  art ") == "line  art "
    with pytest.raises(ValidationError, match=r"'a\\x1b\[31mb' has characters that cannot be"):
        names.validate_python("a\x1b[31mb")


def test_cells_that_look_like_formulas_are_text():
    table = pd.DataFrame({"=name": ["=1+1", "+1", "-x", "@x", "covon"], "bwt": [-0.5, 1, 2, 3, 4]})
    lines = csv_text(table).splitlines()
    assert lines == ["'=name,bwt", "'=1+1,-0.5", "'+1,1.0", "'-x,2.0", "'@x,3.0", "covon,4.0"]
