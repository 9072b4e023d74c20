"""Questions and answers as dialogues: functions of Python's standard library, and Perl's FAQ.

The functions are those of the Python that runs the script (3.11.7 for the stored results), the FAQ
is that of Debian's package perl-doc, which ``manual_pages.py`` downloads. A question belongs to
the same part as a manual page of that name would.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from manual_pages import fetch, pages, part_of, plain

PERL = "perl-doc=5.36.0-7+deb12u3", "e9e3564ff5ade27de0585835f2acad76"


def python_functions() -> Iterator[tuple[str, str]]:
    """Descriptions and code of the standard library's functions."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(file.relative_to(library).parts):
            continue
        with suppress(SyntaxError, UnicodeDecodeError):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                described = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
                if described and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                    node.body = node.body[1:]
                    yield f"Write the Python function {node.name}: {described}", ast.unparse(node)


def perl_questions() -> Iterator[tuple[str, str]]:
    """Frequently asked questions and their answers, of the package perl-doc."""
    for name, roff in sorted(pages(fetch(*PERL))):
        if name.startswith("perlfaq"):
            for part in re.split(r'^\.SS "(?=.*\?"$)', roff, flags=re.MULTILINE)[1:]:
                question, _, answer = part.partition('"\n')
                yield plain(question), plain(answer)


def dialogues(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Questions and answers as dialogues in SmolLM2's format, by part."""
    found: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for question, answer in dict(pairs).items():
        turns = ("user", question), ("assistant", answer)
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
        found[part_of(question)].append(text)
    return found
