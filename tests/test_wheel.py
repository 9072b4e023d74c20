"""The wheel has every file of the package, and nothing else."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "covon_avalanche"


def test_wheel_has_all_files(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (built,) = wheel.build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(built).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    expected = {
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE.rglob("*")
        if file.is_file() and file.suffix not in {".pyc", ".nbi", ".nbc"}
    }
    assert names - metadata == expected
    for needed in ("py.typed", "experiment/recipes/pacs.toml", "report/page.html.j2"):
        assert f"covon_avalanche/{needed}" in names
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
