"""Packages import downwards only and without effects; public names; the wheel is complete."""

import ast
import subprocess
import sys
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import covon_avalanche

ROOT = "covon_avalanche"
PACKAGE = Path(__file__).parents[1] / ROOT
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
#: Each may import what is further up; those of a line do not import each other. Those above
#: data_loading do not import Avalanche.
LAYERS = """
    did_you_mean module_hooks
    atomic_write checks domain_orders float64 last_layer presets safe_text
    posterior
    optim
    closed_form merging prompting
    data_loading
    integrations plugins
    strategies
    backbones evaluation loops streams
    datasets
    experiment
    report
    cli
    __main__
"""
FORBIDDEN = {"ivon"}  # GPL


@cache
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


def test_packages_import_downwards_only():
    problems = []
    layers = [line.split() for line in LAYERS.split("\n")]
    layer_of = {package: i for i, packages in enumerate(layers) for package in packages}
    for file in FILES:
        package = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        layer = layer_of[package]
        allowed = {package, "__version__"} | {name for name, i in layer_of.items() if i < layer}
        avalanche = {"avalanche"} if layer < layer_of["data_loading"] else set()
        for name in sorted(imports(file)):
            top, _, rest = name.partition(".")
            ours = top == ROOT and rest.split(".")[0] not in allowed
            if name.startswith(".") or ours or top in FORBIDDEN | avalanche:
                problems.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not problems, "\n".join(problems)


#: Functions that make a tensor by torch's default device, and those that also use its dtype.
BY_DEVICE = ["arange", "as_tensor", "asarray", "randint", "randperm"]
BY_DTYPE = [
    *("empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn"),
    *("scalar_tensor", "tensor", "zeros"),
]


def test_every_allocation_names_dtype_and_device():
    """Otherwise they depend on torch's global defaults."""
    problems = []
    for file in FILES:
        for node in ast.walk(syntax_tree(file)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            module, _, function = called.rpartition(".")
            if module != "torch" or function not in BY_DEVICE + BY_DTYPE:
                continue
            given = {keyword.arg for keyword in node.keywords}  # None: **options
            missing = {"device", *(["dtype"] if function in BY_DTYPE else [])} - given
            if missing and None not in given:
                names = " and ".join(sorted(missing))
                problems.append(f"{file.relative_to(PACKAGE)}:{node.lineno} names no {names}")
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


IN_A_FRESH_PROCESS = """
import importlib.util
import sys

def lacks(name):
    assert name not in sys.modules, name

import covon_avalanche as ca
import covon_avalanche.report, covon_avalanche.cli.show as s; s.recipes()
lacks("torch")
from covon_avalanche import CoVON, DiagGaussian, load_bundle, merging, posterior
assert ca.CoVON is CoVON and ca.streams.image_transforms
lacks("avalanche")

class Accelerate:  # looks for W&B, if torchmetrics imports it
    def find_spec(self, name, path, target=None):
        if name == "avalanche":
            assert importlib.util.find_spec("wandb") is not None

sys.meta_path.insert(0, Accelerate())
from covon_avalanche.experiment.worker_pool import import_avalanche
import_avalanche()
import covon_avalanche.experiment.run
unused = {"wandb", "torchmetrics", "sklearn", "qpsolvers", "jax"}
assert not {name.partition(".")[0] for name in sys.modules} & unused
import torch, wandb
assert wandb.__version__ and callable(wandb.init)
from avalanche.evaluation.metrics import TopkAccuracy
fake = type(sys)("torchmetrics")
fake.__version__, fake.accuracy = "1.0", lambda *args, top_k, **kwargs: torch.tensor(top_k / 8)
sys.modules.update({"torchmetrics": fake, "torchmetrics.functional": fake})
top = TopkAccuracy(2)
top.update(torch.eye(3), torch.tensor([0, 1, 1]), 0)
assert top.result() == {0: 0.25}
from avalanche.training.plugins import gem
one = torch.ones(1, 1).double().numpy()
assert gem.qpsolvers.solve_qp(P=one, q=one[0], solver="quadprog") == -1
"""


def test_optimizers_do_not_import_avalanche_nor_recipes_torch_nor_workers_wandb():
    """W&B, torchmetrics and the solvers of GEM are imported when they are used."""
    command = [sys.executable, "-W", "ignore", "-c", IN_A_FRESH_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_public_names_load():
    names = set(covon_avalanche.__all__)
    assert not [name for name in names if getattr(covon_avalanche, name, None) is None]
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")} - {"cli"}
    assert set(dir(covon_avalanche)) == {*names, *packages, "strategies", "__version__"}
    for_type_checkers = {name.rpartition(".")[2] for name in imports(PACKAGE / "__init__.py")}
    assert names <= for_type_checkers
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


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(PACKAGE.parent))
    (built,) = wheel.build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(built).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    expected = {
        file.relative_to(PACKAGE.parent).as_posix()
        for file in PACKAGE.rglob("*")
        if file.is_file() and file.suffix not in {".pyc", ".nbi", ".nbc"}
    }
    assert names - metadata == expected
    for needed in ("py.typed", "experiment/recipes/pacs.toml", "report/page.html.j2"):
        assert f"{ROOT}/{needed}" in names
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
