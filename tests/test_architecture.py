"""Arrows go down only; importing has no effects."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "covon_avalanche"
ROOT = "covon_avalanche"
# What each room may import of the others; those with an empty set are leaves.
MAY_IMPORT = {
    "atomic_write": set(),
    "disk_space": set(),
    "domain_orders": set(),
    "posterior": {"atomic_write"},
    "optim": {"posterior"},
    "merging": {"posterior", "optim"},
    "data_loading": set(),
    "plugins": {"posterior", "optim", "merging", "data_loading"},
    "strategies": {"optim", "merging", "plugins", "data_loading"},
    "backbones": set(),
    "datasets": {"atomic_write", "disk_space", "streams"},
    "streams": {"atomic_write", "disk_space", "domain_orders"},
    "evaluation": set(),
    "experiment": {
        "atomic_write",
        "backbones",
        "domain_orders",
        "optim",
        "merging",
        "plugins",
        "strategies",
        "streams",
        "evaluation",
        "data_loading",
    },
    "report": {"atomic_write", "evaluation", "experiment"},
    "cli": {"atomic_write", "datasets", "experiment", "report", "streams"},
    "__main__": {"cli"},
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imports(file: Path) -> set[str]:
    """Dotted names of all imports of a file, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    used = {n.split(".")[1] for n in imports(file) if n.startswith(f"{ROOT}.")}
    assert used - {room, "__version__"} <= MAY_IMPORT[room]
    if room in ("posterior", "optim", "merging"):
        assert not any(n.split(".")[0] == "avalanche" for n in imports(file))
    assert not any(n.split(".")[0] == "ivon" for n in imports(file))


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_public_name_has_a_docstring(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file.name != "__main__.py":
        assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_optimizers_do_not_import_avalanche_and_the_command_line_not_even_torch():
    code = "import sys; from covon_avalanche import CoVON, DiagGaussian, merging, posterior; "
    assert run(code + "print('avalanche' in sys.modules)") == "False"
    assert run("import sys, covon_avalanche.cli; print('torch' in sys.modules)") == "False"


def test_all_public_names_load():
    code = (
        "import covon_avalanche as c; print(len(c.__all__), all(getattr(c, n) for n in c.__all__))"
    )
    assert run(code) == "17 True"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        import covon_avalanche

        covon_avalanche.nothing  # noqa: B018


def test_the_page_of_public_names_has_them_all():
    page = (PACKAGE.parent / "docs/names.md").read_text(encoding="utf-8")
    for module in ("", ".streams", ".backbones", ".evaluation"):
        names = import_module(f"{ROOT}{module}").__all__
        missing = [name for name in names if f"`{name}`" not in page]
        assert not missing
