"""Help texts: one line per option, no broken paragraphs, examples that parse; ``covon env``."""

import os
import re
import shlex
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from terminal import check_command, covon

from covon_avalanche import __version__
from covon_avalanche.cli.examples import EXAMPLES

WIDTH = 80


def help_of(name):
    done = covon(*name.split(), "--help", env={"COLUMNS": str(WIDTH)})
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_has_one_line_paragraphs_fill_theirs_and_examples_parse(name):
    text = help_of(name)
    box = text.partition(" Options ")[2].partition("╰")[0]
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    assert [line for line in lines if line and not re.match(r"(\* +)?--", line)] == []
    paragraphs = [line.strip() for line in text.partition("╭")[0].splitlines()]
    for line, after in pairwise(paragraphs):
        if line and after:  # the next word did not fit
            assert len(line) + len(after.split()[0]) + 1 > WIDTH - 2
    shown = text.rpartition("Examples:")[2]
    for example in EXAMPLES[name]:
        assert f"$ {example}" in shown
        program, *words = shlex.split(example.partition(" > ")[0])
        assert program == "covon"
        assert " ".join(words).startswith(name)
        check_command(words)


def test_computed_defaults_and_the_version_are_printed():
    assert "[default: runs/RECIPE]" in help_of("run")
    assert covon("--version").stdout.strip() == __version__


def test_what_a_bug_report_needs_is_printed_without_names_of_the_user(tmp_path):
    (tmp_path / "core50").mkdir()
    done = covon("env", "--dataset-root", tmp_path)
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found["torch"] == version("torch")
    assert found["timm"] == version("timm")
    assert found["data sets"] == "CORe50"
    assert found["devices"].startswith("cpu")
    assert {"python", "covon_avalanche", "processor", "cores", "instructions"} <= found.keys()
    for private in (tmp_path, Path.home(), os.uname().nodename):
        assert str(private) not in done.stdout
