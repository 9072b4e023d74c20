"""Pages: Python blocks run in short form, commands parse, recipes load, versions agree.

A comment before a block says what to do with it:

    <!-- run: train_epochs=20 -> train_epochs=1 -->    replace, and run after the page's others
    <!-- run                                           the same, with lines of Python to run first
    x = torch.ones(2)
    -->
    <!-- run: file mine.py -->                         write it to a file
    <!-- run: recipe -->                               the block is a recipe
"""

import ast
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from terminal import check_command

import covon_avalanche
from covon_avalanche.experiment.data_settings import STREAMS
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.registry.merge_rules import RULES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = repr(str(ROOT / "benchmarks/results/permuted-digits/results.jsonl"))
BLOCK = re.compile(
    r"(?:^<!-- run(?P<how>[^\n]*?)(?:\n(?P<setup>.*?))?-->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    text: str
    how: str | None
    setup: list[str]


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    parts = ("language", "text", "how")
    return [Block(*m.group(*parts), (m["setup"] or "").splitlines()) for m in found]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def shortened(block: Block) -> str:
    """The text to run: replacements made, lines of the comment first."""
    lines = [block.how.removeprefix(":").strip(), *block.setup]
    text = block.text
    for line in lines:
        old, arrow, new = line.partition(" -> ")
        if arrow:
            assert old in text, f"the block has no {old!r}"
            text = text.replace(old, RESULTS if new == "RESULTS" else new)
    return "\n".join([*(line for line in lines if line and " -> " not in line), text])


def pages_to_run() -> list[Path]:
    return [page for page in PAGES if any(b.how is not None for b in blocks(page))]


@pytest.mark.parametrize("page", pages_to_run(), ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(page):
        order = (block.how or "").removeprefix(":").strip()
        if block.how is None:
            continue
        if order.startswith("file "):
            (tmp_path / order.removeprefix("file ")).write_text(block.text, encoding="utf-8")
        elif block.language == "toml":
            (tmp_path / "recipe.toml").write_text(block.text, encoding="utf-8")
            load_recipe(str(tmp_path / "recipe.toml"))
        else:
            code = shortened(block)
            exec(compile(code, f"{name_of(page)}: {block.text.splitlines()[0]}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_are_python(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text.replace(">>> ", ""), name_of(page), "exec")


def commands(page: Path) -> list[tuple[list[str], bool]]:
    """All ``covon`` and ``pip`` commands as words, and whether they are whole: in a block."""
    text = page.read_text(encoding="utf-8")
    lines = [line for b in blocks(page) if b.language == "bash" for line in b.text.splitlines()]
    found = [(part, True) for line in lines for part in line.partition(" #")[0].split("&&")]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found += [(" ".join(s.split()), False) for s in re.findall(r"`((?:covon|pip) [^`]+)`", prose)]
    words = [(shlex.split(part.partition(" > ")[0]), whole) for part, whole in found]
    return [(line, whole) for line, whole in words if line and line[0] in ("covon", "pip")]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name_of)
def test_commands_parse(page):
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M))
    for (program, *words), whole in commands(page):
        if program == "covon":
            check_command(words, whole)
        elif wanted := re.findall(r"^\.\[([\w,]+)\]$", words[-1]):
            assert set(wanted[0].split(",")) <= extras, words


def test_the_page_of_recipes_has_all_kinds_streams_and_rules():
    page = (ROOT / "docs/experiments.md").read_text("utf-8")
    rules = [f'"{rule}"' for rule in RULES]
    assert not [name for name in (*KINDS, *STREAMS, *rules) if f"`{name}`" not in page]


def test_exported_names_are_lists_that_the_site_can_read():
    for file in (ROOT / "covon_avalanche").glob("*/__init__.py"):
        for found in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(found, ast.Assign) and ast.unparse(found.targets[0]) == "__all__":
                assert ast.literal_eval(found.value), file  # the site does not import modules


def test_versions_agree():
    version = covon_avalanche.__version__
    patterns = {"pyproject.toml": r'^version = "(.+)"$', "CITATION.cff": r"^version: (.+)$"}
    for file, pattern in patterns.items():
        (found,) = re.findall(pattern, (ROOT / file).read_text("utf-8"), re.MULTILINE)
        assert found == version, file


def test_readme_and_changelog_stay_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (unreleased,) = re.findall(r"^## Unreleased\n(.*?)^## ", changes, re.MULTILINE | re.DOTALL)
    assert len(unreleased.splitlines()) <= 60
    headings = re.findall(r"^### (.+)$", unreleased, re.MULTILINE)
    assert headings == ["Added", "Changed", "Fixed", "Removed"]


def test_relative_links_lead_to_files():
    broken = []
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.DOTALL)
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
            if not (page.parent / link).exists():
                broken.append(f"{name_of(page)}: {link}")
    assert not broken
