"""``covon predict``."""

import csv
import io
import itertools
import shutil
from pathlib import Path

import pytest
import torch
from made_up_results import made_up
from miniature import own
from PIL import Image
from small_recipes import NETWORK, saved, short_recipe
from terminal import covon, covon_in_a_process, refused

from covon_avalanche import DiagGaussian, save_bundle
from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


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


def test_names_in_any_encoding_are_printed_without_a_home_or_a_notebooks_backend(bundle, tmp_path):
    """In a process of its own, because its standard output and the environment count."""
    (images := tmp_path / "images").mkdir()
    for name in ("caf\udce9.png", "写真.png"):  # the byte of é in Latin-1
        Image.new("RGB", (80, 70)).save(images / "x.png")
        (images / "x.png").rename(images / name)
    made_up("covon", 0, [[0.9]], calibration={}).save(tmp_path / "result.json")
    report = ["report", tmp_path / "result.json", "--out", tmp_path / "report"]
    predict = ["predict", bundle, images]
    home = str(tmp_path / "no/home")  # where Avalanche could not write its settings
    inherited = {"MPLBACKEND": "module://nowhere.backend_inline", "HOME": home}
    commands = ("ascii", predict), ("cp1252", predict), ("cp1252", [*predict, "--csv"])
    ascii, cp1252, csv_file, about, _ = covon_in_a_process(
        inherited, *commands, ("cp1252", ["env"]), ("cp1252", report)
    )
    assert "写真" in ascii.decode("utf-8")  # click takes UTF-8 for ASCII
    assert r"\u5199\u771f" in cp1252.decode("cp1252")
    assert all(rb"caf\udce9.png" in table for table in (ascii, cp1252))
    rows = list(csv.DictReader(io.StringIO(csv_file.decode("utf-8"))))  # all the same
    assert sorted(Path(row["image"]).name for row in rows) == [r"caf\udce9.png", "写真.png"]
    assert b"home is writable: no" in about
    assert not (tmp_path / "no").exists()
    assert (tmp_path / "report/index.html").is_file()
    assert list((tmp_path / "report/figures").glob("*.png"))


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
        assert sentence in refused("predict", *arguments)


def test_warnings_are_one_sentence_without_path_and_source_line(bundle, tmp_path):
    Image.new("RGBA", (80, 70)).save(tmp_path / "clear.png")
    done = covon("predict", bundle, tmp_path)
    says = f"transparent images, such as {tmp_path / 'clear.png'}, are put on white"
    assert done.stderr == f"warning: {says}\n"


def test_images_that_cannot_be_decoded_are_reported_and_the_others_predicted(bundle, tmp_path):
    whole = (bundle / "images/more/0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(whole)
    for i in range(1, 9):
        (tmp_path / f"{i}.png").write_bytes(whole[:60] if i % 2 else b"no image")
    done = covon("predict", bundle, tmp_path, "--csv", "--batch-size", 2, status=2)
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert row["image"] == str(tmp_path / "0.png")
    *named, others = done.stderr.splitlines()
    for i, line in enumerate(named, 1):
        assert line.startswith(f"covon: the image {tmp_path}/{i}.png cannot be decoded: ")
    assert others == "covon: 3 other images cannot be decoded"


def labelled(bundle, root, places):
    """Pictures of the three colours in each of the folders, and what the model takes them for."""
    for place, i in itertools.product(places, range(3)):
        (root / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(bundle / f"images/more/{i}.png", root / place / f"{i}.png")
    done = covon("predict", bundle, bundle / "images", "--csv")
    return [row["class"] for row in csv.DictReader(io.StringIO(done.stdout))]


def table_of(text):
    """The confusion table at the end, by label and prediction."""
    header, _, *rows = (line.split() for line in text.partition("prediction\n")[2].splitlines())
    names = header[1:]
    return {(row[0], p): int(n) for row in rows for p, n in zip(names, row[1:], strict=True)}


@pytest.mark.parametrize("domains", [(), ("day", "night")])
def test_the_accuracy_on_labelled_images_follows(bundle, tmp_path, domains):
    classes = ("cat", "dog", "fox")  # cow has no images, fox is no class of the model
    places = [f"{d}/{c}" for d in domains for c in classes] or classes
    predicted = labelled(bundle, tmp_path / "x", places)
    done = covon("predict", bundle, tmp_path / "x", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["label"] for row in rows] == [c for p in places for c in [p.split("/")[-1]] * 3]
    assert [row.get("domain") for row in rows] == [d for d in domains or [None] for _ in range(9)]
    n = len(domains) or 1
    right = {c: predicted.count(c) for c in ("cat", "dog")}
    k = sum(right.values())
    said = done.stderr.splitlines()
    assert said[1] == f"images without a label of the model's classes: {3 * n}"
    assert said[2] == f"accuracy: {100 * k / 6:.1f} % ({n * k} of {6 * n})"
    each = [f"accuracy on {d}: {100 * k / 6:.1f} % ({k} of 6)" for d in domains]
    assert said[3 : said.index("", 1)] == each
    known = {"cat", "dog", *predicted}
    want = {(c, p): n * predicted.count(p) for c in ("cat", "dog") for p in known}
    assert table_of(done.stderr) == want
    plain = covon("predict", bundle, tmp_path / "x").stdout
    assert plain.endswith(done.stderr)
    assert len(plain.splitlines()) == 1 + 9 * n + len(said)


def test_images_of_a_table_are_predicted_and_those_for_training_left_out(bundle, tmp_path):
    predicted = labelled(bundle, tmp_path, ["a"])
    rows = [f"a/{i}.png,day,{name},test\n" for i, name in enumerate(predicted)]
    for header in ("file,domain,label,split", "path,domain,class,split"):
        (tmp_path / "x.csv").write_text(f"{header}\n{''.join(rows)}a/0.png,day,dog,train\n")
        done = covon("predict", bundle, tmp_path / "x.csv")
        assert "accuracy: 100.0 % (3 of 3)\naccuracy on day: 100.0 % (3 of 3)\n" in done.stdout
    (tmp_path / "x.csv").write_text(f"file,label,split\na/0.png,{predicted[0]},valid\n")
    assert "accuracy: 100.0 % (1 of 1)\n" in covon("predict", bundle, tmp_path / "x.csv").stdout
    (tmp_path / "x.csv").write_text("file,label\na/0.png,fox\n")
    done = covon("predict", bundle, tmp_path / "x.csv")
    assert done.stdout.endswith("\nimages without a label of the model's classes: 1\n")
    for text, sentence in (
        ("file\na/0.png\n", "x.csv lacks the columns ['label']"),
        ("file,label\na/9.png,dog\n", "there is no file"),
        ("file,label\n", "there are no images in"),
        ("file,label,split\na/0.png,dog,train\n", "has only images of the split train"),
    ):
        (tmp_path / "x.csv").write_text(text)
        assert sentence in refused("predict", bundle, tmp_path / "x.csv")


@pytest.mark.parametrize("model", [NETWORK, {"hidden_size": 8, "hidden_layers": 1}])
def test_predicting_the_listed_images_gives_the_accuracy_of_the_run(model, tmp_path):
    own(tmp_path / "mine", "plain")
    stream = {"name": "DomainFolders", "folder": "mine", "domains": ["night", "day"], "limit": 3,
              "image_size": 32, "groups": "[0-9]"}  # fmt: skip
    recipe = short_recipe("finetune", stream=stream, model=model, train_mb_size=4, epochs=1)
    file, root = saved(recipe, tmp_path), ("--dataset-root", tmp_path)
    folder = RunFolder(tmp_path / "runs", recipe, "finetune", 0, tmp_path)
    result = run_in_folder(folder, RunOptions(bundle=True))
    listed = covon("data", "list", file, "--split", "test", "--set", "seeds=[0]", *root)
    (tmp_path / "tested.csv").write_text(listed.stdout)
    done = covon("predict", folder.path / "bundle", tmp_path / "tested.csv")
    tested = zip(("night", "day"), result.counts, result.accuracy[-1], strict=True)
    for domain, n, accuracy in tested:
        right = round(n * accuracy)
        assert f"accuracy on {domain}: {100 * accuracy:.1f} % ({right} of {n})\n" in done.stdout
