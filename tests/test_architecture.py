"""Packages import downwards only; importing has no side effects; public names are documented."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import covon_avalanche

ROOT = "covon_avalanche"
PACKAGE = Path(__file__).parents[1] / ROOT
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
#: What each package or module may import of the others.
MAY_IMPORT = {
    "atomic_write": set(),
    "domain_orders": set(),
    "posterior": {"atomic_write"},
    "optim": {"posterior"},
    "merging": {"posterior", "optim"},
    "input_moments": {"merging"},
    "data_loading": set(),
    "plugins": {"posterior", "optim", "merging", "data_loading"},
    "strategies": {"optim", "merging", "plugins", "data_loading"},
    "backbones": set(),
    "streams": {"atomic_write", "domain_orders"},
    "datasets": {"atomic_write", "streams"},
    "evaluation": set(),
    "experiment": {
        "atomic_write",
        "backbones",
        "data_loading",
        "domain_orders",
        "evaluation",
        "merging",
        "optim",
        "plugins",
        "strategies",
        "streams",
    },
    "report": {"atomic_write", "evaluation", "experiment"},
    "cli": {"atomic_write", "datasets", "experiment", "report", "streams"},
    "__main__": {"cli"},
}
WITHOUT_AVALANCHE = {"posterior", "optim", "merging", "prompting", "closed_form"}
FORBIDDEN = {"ivon"}  # GPL


def syntax_tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> set[str]:
    """Dotted names of all imports of a file, at any depth."""
    names = set()
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def package_of(module: str) -> str:
    return "cli" if module.startswith("cli_") else module


def test_packages_import_downwards_only():
    problems = []
    for file in FILES:
        package = package_of(file.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        allowed = MAY_IMPORT.get(package, set()) | {package, "__version__"}
        forbidden = FORBIDDEN | ({"avalanche"} if package in WITHOUT_AVALANCHE else set())
        for name in sorted(imports(file)):
            top, _, rest = name.partition(".")
            ours = top == ROOT and package_of(rest.split(".")[0]) not in allowed
            if name.startswith(".") or ours or top in forbidden:
                problems.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not problems, "\n".join(problems)


def test_public_modules_classes_and_functions_have_docstrings():
    problems = []
    for file in FILES:
        tree = syntax_tree(file)
        documented = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        documented += [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        missing = [n.name for n in documented if n.name[0] != "_" and not ast.get_docstring(n)]
        if file.name != "__main__.py" and not ast.get_docstring(tree):
            missing.insert(0, "the module")
        problems += [f"{file.relative_to(PACKAGE)}: {name}" for name in missing]
    assert not problems, "no docstring:\n" + "\n".join(problems)


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_optimizers_do_not_import_avalanche_and_the_command_line_not_even_torch():
    code = "import sys; from covon_avalanche import CoVON, DiagGaussian, merging, posterior; "
    assert run(code + "print('avalanche' in sys.modules)") == ["False"]
    assert run("import sys, covon_avalanche.cli; print('torch' in sys.modules)") == ["False"]


def test_all_public_names_load():
    missing = [n for n in covon_avalanche.__all__ if getattr(covon_avalanche, n, None) is None]
    assert not missing
    assert set(covon_avalanche.__all__) <= set(dir(covon_avalanche))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        covon_avalanche.nothing  # noqa: B018


def test_the_page_of_public_names_has_them_all():
    page = (PACKAGE.parent / "docs/names.md").read_text(encoding="utf-8")
    missing = [
        f"{ROOT}{module}.{name}"
        for module in ("", ".streams", ".backbones", ".evaluation")
        for name in import_module(f"{ROOT}{module}").__all__
        if f"`{name}`" not in page
    ]
    assert not missing
