"""Hooks of the site: pages from files outside ``docs``, and links, formulas and roles in them.

Links in ``docs`` are relative to the repository, so that they work on its web page. In the site,
links to files outside ``docs`` lead to pages that show these files.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tutorials": "quickstart.md",
}
MODULES = {
    "covon_avalanche": "top",
    "covon_avalanche.optim": "optim",
    "covon_avalanche.optim.quadratic_anchor": "quadratic_anchor",
    "covon_avalanche.posterior": "posterior",
    "covon_avalanche.posterior.fisher": "fisher",
    "covon_avalanche.merging": "merging",
    "covon_avalanche.merging.alignment": "alignment",
    "covon_avalanche.plugins": "plugins",
    "covon_avalanche.plugins.posterior": "plugins_posterior",
    "covon_avalanche.plugins.quadratic_anchor": "plugins_quadratic_anchor",
    "covon_avalanche.strategies": "strategies",
    "covon_avalanche.loops": "loops",
    "covon_avalanche.integrations.lightning": "lightning",
    "covon_avalanche.integrations.huggingface": "huggingface",
    "covon_avalanche.streams": "streams",
    "covon_avalanche.streams.image_benchmark": "image_benchmark",
    "covon_avalanche.backbones": "backbones",
    "covon_avalanche.data_loading": "data_loading",
    "covon_avalanche.evaluation": "evaluation",
    "covon_avalanche.closed_form": "closed_form",
    "covon_avalanche.prompting": "prompting",
    "covon_avalanche.experiment.bundle": "bundle",
    "covon_avalanche.experiment.result": "result",
    "covon_avalanche.report": "report",
}
MEMBERS = {  # where not all names are public, or they are documented elsewhere
    "covon_avalanche": "[]",
    "covon_avalanche.optim.quadratic_anchor": "[QuadraticAnchor, adam_second_moments]",
    "covon_avalanche.merging.alignment": "[FeatureGaussians, fit_gaussians, align_layers]",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}
LARGEST = 200_000  # bytes of a file that is shown
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(\))")


# Pages ---------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Put the pages of the public modules into the navigation."""
    for section in config["nav"]:
        if "API" in section:
            section["API"] = [{_short(name): f"api/{page}.md"} for name, page in MODULES.items()]
    return config


def _short(module: str) -> str:
    return module.removeprefix("covon_avalanche.")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of modules, tutorials and files that pages link to."""
    pages = {f"api/{page}.md": _module_page(name) for name, page in MODULES.items()}
    queue = {ROOT / "CHANGELOG.md": "changelog.md", ROOT / "CONTRIBUTING.md": "contributing.md"}
    scripts = sorted((ROOT / "tutorials").glob("*.py"))
    queue |= {file: _address(file) for file in scripts if _is_tutorial(file)}
    known = set(queue)
    for file in files.documentation_pages():
        text = Path(file.abs_src_path).read_text(encoding="utf-8")
        pages_of = _outside(text, Path(file.abs_src_path))
        queue |= {path: _address(path) for path in pages_of - known}
        known |= pages_of
    while queue:
        path, address = queue.popitem()
        text = _page_of(path)
        if path.suffix == ".md" or _is_tutorial(path):
            new = _outside(text, path) - known
            queue |= {found: _address(found) for found in new}
            known |= new
            text = _with_site_links(text, path, address)
        pages[address] = text
    for address, text in pages.items():
        hidden = address.startswith("source/")
        level = InclusionLevel.NOT_IN_NAV if hidden else InclusionLevel.UNDEFINED
        files.append(File.generated(config, address, content=text, inclusion=level))
    return files


def _module_page(name: str) -> str:
    options = f"\n    options:\n      members: {MEMBERS[name]}" if name in MEMBERS else ""
    table = _top_level() if name == "covon_avalanche" else ""
    return f"# `{name}`\n\n::: {name}{options}\n{table}"


def _top_level() -> str:
    """A table of the names of the first module and the modules that define them."""
    from covon_avalanche import _HOME

    rows = [
        f"| [`{name}`][covon_avalanche.{home}.{name}] | `covon_avalanche.{home}` |"
        for name, home in sorted(_HOME.items())
    ]
    return "\n".join(["", "| name | defined in |", "|---|---|", *rows, ""])


def _page_of(path: Path) -> str:
    """Markdown that shows a file, or lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if _is_tutorial(path):
        return _tutorial(path)
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n"
    if path.is_dir():
        return head + "\n".join(f"- `{p.name}`" for p in sorted(path.iterdir()))
    if path.stat().st_size > LARGEST or path.suffix not in LANGUAGES:
        return f"{head}A file of {path.stat().st_size:,} bytes in the repository."
    text = path.read_text(encoding="utf-8")
    return f"{head}````{LANGUAGES[path.suffix]}\n{text}````\n"


def _is_tutorial(path: Path) -> bool:
    return path.parent == ROOT / "tutorials" and path.name != "record.py" and path.suffix == ".py"


def _tutorial(path: Path) -> str:
    """A script in percent format as Markdown, with the stored outputs of its cells."""
    stored = path.parent / "outputs" / f"{path.stem}.json"
    outputs = iter(json.loads(stored.read_text(encoding="utf-8"))["outputs"])
    parts = []
    cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for cell in cells:
        kind, _, body = cell.partition("\n")
        if "markdown" in kind:
            parts.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip())
            continue
        output = next(outputs)
        parts.append(f"```python\n{body.strip()}\n```")
        if output["text"]:
            parts.append(f"```text\n{output['text']}\n```")
        if "figure" in output:
            parts.append(f"![](../{output['figure']})")
    return "\n\n".join([*parts, "---", f"The script of this page is `tutorials/{path.name}`."])


# Links ---------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside ``docs`` lead to their pages."""
    source = page.file.abs_src_path
    if source is None:  # generated: its links are those of the site
        return markdown
    return _with_site_links(markdown, Path(source), page.file.src_uri)


def _outside(text: str, source: Path) -> set[Path]:
    """The files and folders outside ``docs`` that a page links to."""
    targets = {(source.parent / found[2]).resolve() for found in LINK.finditer(text)}
    return {t for t in targets if t.exists() and _address(t).startswith("source/")}


def _address(path: Path) -> str:
    """The page of the site for a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if _is_tutorial(path):
        return f"tutorials/{path.stem}.md"
    return f"source/{name}.md" if path.suffix != ".md" else f"source/{name}"


def _with_site_links(text: str, source: Path, address: str) -> str:
    def site_link(found: re.Match[str]) -> str:
        target = (source.parent / found[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return found[0]  # which mkdocs reports
        link = posixpath.relpath(_address(target), posixpath.dirname(address) or ".")
        return f"{found[1]}{link}{found[3] or ''}{found[4]}"

    return LINK.sub(site_link, text)


# Formulas and docstrings -----------------------------------------------------------------------


def on_page_content(content: str, **_: Any) -> str:
    """Turn LaTeX into MathML, which browsers show without scripts."""

    def mathml(found: re.Match[str]) -> str:
        block = found[1] == "div"
        latex = html.unescape(found[2]).strip()[2:-2]
        return convert(latex, display="block" if block else "inline")

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', mathml, content, flags=re.DOTALL)


def _table(found: re.Match[str]) -> str:
    """A simple table of two columns, in Markdown."""
    width = len(found[1])
    rows = [
        f"| {line[:width].strip()} | {line[width:].strip()} |" for line in found[2].splitlines()
    ]
    return "\n".join(["| column | |", "|---|---|", *rows])


class Docstrings(griffe.Extension):
    """Turns Sphinx's roles and literal blocks into Markdown, and ``Unpack`` into arguments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is None:
            return
        text = re.sub(r":[a-z]+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", obj.docstring.value)
        text = re.sub(r" ?::$", ":", text, flags=re.MULTILINE)
        table = r"^(=+) =+\n(.*?)^=+ =+$"
        obj.docstring.value = re.sub(table, _table, text, flags=re.MULTILINE | re.DOTALL)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the keys of a ``TypedDict`` of the same module as keyword-only arguments."""
        for parameter in list(func.parameters):
            name = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
            keys = name and func.parent and func.parent.members.get(name[1])
            if not keys or keys.is_alias:
                continue
            del func.parameters[parameter.name]
            for key, attribute in keys.attributes.items():
                kind = griffe.ParameterKind.keyword_only
                func.parameters[key] = griffe.Parameter(
                    key, annotation=attribute.annotation, kind=kind, default="..."
                )
