"""The short form of a report, by hand."""

import io

import pytest
from made_up_results import made_up
from rich.console import Console

from covon_avalanche.report import brief, sections_of
from covon_avalanche.report.columns import ACCURACY, brief_columns
from covon_avalanche.report.tables import markdown_table


@pytest.fixture
def section():
    runs = [
        made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]]),
        made_up("naive", 0, [[0.9, 0.1], [0.3, 0.9]], kind="finetune"),
        made_up("covon", 1, [[0.9, 0.1], [0.9, 0.9]], seconds=3.0),
        made_up("joint", 0, [None, [0.95, 0.95]], kind="joint"),
    ]
    (found,) = sections_of(runs)
    return found


def test_markdown(section):
    lines = brief.brief_markdown(section).splitlines()
    assert lines[0] == "| strategy | A_T % | BWT % | seconds | memory | seeds |"
    assert lines[3] == "| **covon** | **85.00 ± 7.07** | -5.00 ± 7.07 | 5.0 | 5.0 | 2 |"
    assert lines[4] == "| naive | 60.00 | -60.00 | 4.0 | 5.0 | 1 |"
    assert "joint" in lines[2]  # never the best
    assert "ceiling" in lines[2]


def test_only_the_accuracy_is_bold(section):
    """Who has the best of it need not be the best in what else is shown."""
    table = markdown_table(section, [c for c in brief_columns(section) if c is not ACCURACY])
    assert table.splitlines()[3] == "| **covon** | -5.00 ± 7.07 | 5.0 | 5.0 | 2 |"


def test_the_table_of_the_terminal(section):
    console = Console(file=io.StringIO(), width=90)
    console.print(brief.rich_table(section))
    text = console.file.getvalue()
    assert "joint (ceiling)" in text
    assert "85.00 ± 7.07" in text


def test_pictures(section, tmp_path):
    brief.save_curves(section, tmp_path / "curves.png")
    brief.save_matrix(section, section.standings[1], tmp_path / "matrix.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000
