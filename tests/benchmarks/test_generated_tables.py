"""Tables in pages are those that scripts make from the stored results."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def part_of(page, script):
    """What is between a script's markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"<!-- results: {script} -->")[2].partition("<!-- end of results -->")[0]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_overview(benchmarks):
    import overview

    assert part_of("README.md", overview.NAME).strip() == overview.overview().strip()


@pytest.mark.parametrize(
    ("module", "page"),
    [("permuted_digits", "docs/digits.md"), ("permuted_mnist", "docs/permuted-mnist.md")],
)
def test_tables_of_recipes(module, page, benchmarks, monkeypatch):
    script = __import__(module)
    written = {}
    monkeypatch.setattr(script.figures, "save", lambda *_: None)
    monkeypatch.setattr(
        script, "replace_part", lambda page, name, text: written.update({(page, name): text})
    )
    script.write_report()
    assert {file for file, _ in written} == {ROOT / page}
    for (_, name), text in written.items():
        assert part_of(page, name).strip() == text.strip()
