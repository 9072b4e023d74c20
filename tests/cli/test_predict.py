"""``covon predict``."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from terminal import covon

from covon_avalanche import DiagGaussian, save_bundle
from covon_avalanche.backbones import create_backbone


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    torch.manual_seed(0)
    model = create_backbone("squeezenet", 3)
    mean = {name: p.detach() for name, p in model.named_parameters()}
    posterior = DiagGaussian(mean, {name: torch.full_like(p, 1e4) for name, p in mean.items()})
    save_bundle(
        folder, model, ["cat", "dog", "cow"], [3, 64, 64], backbone="squeezenet",
        posterior=posterior,
    )  # fmt: skip
    for i, colour in enumerate(["red", "green", "blue"]):
        (folder / "images/more").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 70), colour).save(folder / f"images/more/{i}.png")
    (folder / "images/more/._0.png").write_bytes(b"metadata")  # hidden: not an image
    return folder


def test_images_get_a_class_and_its_uncertainty(bundle):
    images = bundle / "images"
    done = covon("predict", bundle, images, images / "more/1.png", "--csv", "--samples", 4)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["image"][-5:] for row in rows] == ["0.png", "1.png", "2.png", "1.png"]
    for row in rows:
        p = {name: float(row[name]) for name in ("cat", "dog", "cow")}
        assert sum(p.values()) == pytest.approx(1)
        assert row["class"] == max(p, key=p.get)
        assert 0 < float(row["mutual_information"]) < float(row["entropy"]) < 1.1
    assert float(rows[1]["cat"]) == pytest.approx(float(rows[3]["cat"]))  # the same image
    one_by_one = covon("predict", bundle, images, "--csv", "--samples", 4, "--batch-size", 1)
    for row, other in zip(rows, csv.DictReader(io.StringIO(one_by_one.stdout)), strict=False):
        assert float(row["cat"]) == pytest.approx(float(other["cat"]), rel=1e-4)
    table = covon("predict", bundle, images).stdout.splitlines()
    assert table[0].split() == ["image", "class", "probability", "entropy"]
    assert len(table) == 4


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
def test_names_in_any_encoding_are_printed(bundle, tmp_path, encoding):
    """In a process of its own, because its standard output and the environment count."""
    for name in ("caf\udce9.png", "写真.png"):  # the byte of é in Latin-1
        Image.new("RGB", (80, 70)).save(tmp_path / "x.png")
        (tmp_path / "x.png").rename(tmp_path / name)
    command = [sys.executable, "-m", "covon_avalanche", "predict", bundle, tmp_path]
    home = str(tmp_path / "nowhere")  # where Avalanche could not write its settings
    variables = {**os.environ, "PYTHONIOENCODING": encoding, "HOME": home}
    with_csv = subprocess.run([*command, "--csv"], env=variables, capture_output=True, check=True)
    rows = list(csv.DictReader(io.StringIO(with_csv.stdout.decode("utf-8"))))
    assert sorted(Path(row["image"]).name for row in rows) == [r"caf\udce9.png", "写真.png"]
    table = subprocess.run(command, env=variables, capture_output=True, check=True).stdout
    photo = r"\u5199\u771f" if encoding == "cp1252" else "写真"  # click takes UTF-8 for ASCII
    assert photo in table.decode("utf-8")
    assert r"caf\udce9.png" in table.decode("utf-8")


def test_what_cannot_be_predicted_is_one_sentence(bundle, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no image")
    for arguments, sentence in (
        ((tmp_path, bundle / "images"), "is not a bundle: bundle.json cannot be read"),
        ((bundle, tmp_path / "empty"), "there are no images in"),
        ((bundle, tmp_path / "text.png"), "text.png cannot be decoded"),
        ((bundle, tmp_path / "absent"), "there is no file or folder"),
        ((tmp_path / "absent", bundle / "images"), "there is no folder"),
    ):
        done = covon("predict", *arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("covon: ")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
