"""Tables in pages are those that scripts make from the stored results."""

import overview
import permuted_digits
import permuted_mnist
import pytest
from comparison import ROOT


def part_of(page, script):
    """What is between a script's markers."""
    text = page.read_text(encoding="utf-8")
    return text.partition(f"<!-- results: {script} -->")[2].partition("<!-- end of results -->")[0]


def test_overview():
    assert part_of(overview.PAGE, overview.NAME).strip() == overview.overview().strip()


@pytest.mark.parametrize(
    ("script", "page"), [(permuted_digits, "digits.md"), (permuted_mnist, "permuted-mnist.md")]
)
def test_tables_of_recipes(script, page, monkeypatch):
    written = {}
    monkeypatch.setattr(script.figures, "save", lambda *_: None)
    monkeypatch.setattr(
        script, "replace_part", lambda page, name, text: written.update({(page, name): text})
    )
    script.write_report()
    assert {file for file, _ in written} == {ROOT / "docs" / page}
    for (file, name), text in written.items():
        assert part_of(file, name).strip() == text.strip()
