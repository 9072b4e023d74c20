"""What leaves the machine: bundles, report pages, archives and TensorBoard's files."""

import base64
import gzip
import io
import json
import platform
import re
import shutil
import socket
import zipfile

import pytest
import torch
from made_up_results import made_up
from miniature import own
from PIL import Image, PngImagePlugin
from small_recipes import NETWORK, saved, short_recipe
from terminal import covon, refused

from covon_avalanche import load_bundle
from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.data_settings import published
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder, run_folders
from covon_avalanche.experiment.run_options import RunOptions

VARIABLES = {
    "WANDB_API_KEY": "wandb-key-5Z",
    "HF_TOKEN": "hf_token-6Y",
    "GITHUB_TOKEN": "ghp_token-7X",
    "AWS_SECRET_ACCESS_KEY": "aws-secret-8W",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-password-9V",
    "USER": "eve-the-user",
    "LOGNAME": "eve-the-user",
    "USERNAME": "eve-the-user",
    "HOSTNAME": "secret-host-4",
}
REMOTE = "https://eve:git-password-3@example.org/private.git"
SECRETS = {*VARIABLES.values(), "git-password-3", "home-of-eve"}


def contents(data: bytes):
    """All bytes of a file, those of archives, PNG chunks and embedded images unpacked."""
    yield data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield from contents(archive.read(name))
    if data.startswith(b"\x1f\x8b"):
        yield from contents(gzip.decompress(data))
    if data.startswith(b"\x89PNG"):
        with Image.open(io.BytesIO(data)) as image:
            yield from (text.encode() for text in image.text.values())
    for embedded in re.findall(rb"base64,([A-Za-z0-9+/=]+)", data):
        yield from contents(base64.b64decode(embedded))


def leaks(data: bytes) -> set[str]:
    return {secret for part in contents(data) for secret in SECRETS if secret.encode() in part}


def test_secrets_are_found_wherever_they_are():
    def packed(name, data):
        with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)
        return buffer.getvalue()

    (info := PngImagePlugin.PngInfo()).add_text("Comment", "by eve-the-user", zip=True)
    Image.new("L", (2, 2)).save(buffer := io.BytesIO(), "PNG", pnginfo=info)
    hidden = [b"... eve-the-user", gzip.compress(b"eve-the-user"), buffer.getvalue()]
    hidden += [packed("a", hidden[0]), packed("eve-the-user", b"")]
    hidden += [packed("a.zip", packed("b.gz", hidden[1]))]
    hidden += [b"<img src='data:image/png;base64," + base64.b64encode(hidden[2]) + b"'>"]
    assert [leaks(data) for data in hidden] == [{"eve-the-user"}] * len(hidden)
    assert leaks(packed("a.zip", packed("b.gz", gzip.compress(b"nothing")))) == set()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of a user, in a repository with a password, on a machine with a name."""
    home = tmp_path / "home-of-eve"
    own(home / "data/pictures", "plain")
    (home / ".git").mkdir()
    (home / ".git/config").write_text(f'[remote "origin"]\n\turl = {REMOTE}\n')
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    for module, function in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
        monkeypatch.setattr(module, function, lambda: "secret-host-4")
    monkeypatch.chdir(home)
    return home


def test_nothing_that_is_published_tells_users_hosts_paths_or_passwords(here, request):
    data = here / "data"
    torch.save(create_backbone("squeezenet", 3).state_dict(), data / "start.pth")
    stream = {"name": "DomainFolders", "folder": str(data / "pictures"), "image_size": 32,
              "domains": ["day", "night"], "groups": r"^\d+"}  # fmt: skip
    model = {"backbone": "squeezenet", "weights": str(data / "start.pth")}
    title = f"Photos in {data}, listed by file://{data}/a list, of https://example.org/a/b"
    changes = {"title": title, "train_mb_size": 8, "epochs": 1}
    recipe = short_recipe("finetune", stream=stream, model=model, **changes)
    recipe = load_recipe(str(saved(recipe, here)))
    (folder,) = run_folders(recipe, here / "runs")[:1]
    result = run_in_folder(folder, RunOptions(bundle=True, tensorboard=True))
    assert str(data) in folder.result_file.read_text()  # which stays on the machine

    covon("report", "runs", "-o", "report", "--zip")
    request.getfixturevalue("undrawn")
    covon("report", "runs", "-o", "named", "--title", f"Mine, {data}")
    published = [here / "report.zip", *(here / "report").rglob("*.*"), here / "named/index.html"]
    published += [*(folder.path / "bundle").iterdir(), *(folder.path / "tensorboard").iterdir()]
    assert len(published) > 12
    for file in published:
        inside = file.relative_to(here).as_posix().encode()
        assert leaks(inside) | leaks(file.read_bytes()) == set(), file

    modes = {file.stat().st_mode for file in (folder.path / "bundle").iterdir()}
    assert modes == {(here / "tiny.toml").stat().st_mode}  # as readable as any file

    bundle = load_bundle(folder.path / "bundle")
    for settings in (bundle.info.run, json.loads((folder.path / "bundle/bundle.json").read_text())):
        assert re.fullmatch("start.pth@[0-9a-f]{8}", settings["model"]["weights"])
    assert re.fullmatch("pictures@[0-9a-f]{8}", bundle.info.run["stream"]["folder"])

    zipfile.ZipFile(here / "report.zip").extractall(here / "got")
    again = load_recipe(str(here / "got/permuted-digits.toml"))
    moved = here.parent / "elsewhere"
    shutil.copytree(data, moved)
    repeated = RunFolder(here / "new", again, "finetune", 0, moved)
    new = run_in_folder(repeated)
    assert new.accuracy == result.accuracy
    assert RunFolder(here / "runs", again, "finetune", 0, data).path == folder.path  # the same run
    both = covon("report", "got/results.jsonl", "new", "-o", "both")
    assert "both/index.html: 1 run;" in both.output  # with the same accuracies


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/home/eve/x", "x@"),
        ("/home/eve/x/", "x@"),
        ("C:/Users/eve/x", "x@"),
        (r"\\server\eve\x", "x@"),
        ("file:///home/eve/x.png", "x.png@"),
        ("photos in /home/eve/own photos/x, small", "photos in x, small@"),
        (r"photos ('c:\Users\eve\x')", "photos ('x')@"),
        ("git@host:/eve/x, folder=/home/eve/y", "git@host:y@"),
        *((kept, kept) for kept in ("https://example.org/a/b", "A/B, w/ c, </d> / e", "..", "/")),
        ("<b>/home/eve/x", "<b>x@"),
        *((kept, kept) for kept in ("5 images /class, 3 /domain", "err [/s], N=/2", "[/b]")),
        *((kept, kept) for kept in ("~/x", r"^\d+", r"\d+_", "s3://a/b", "a: b", "x@0123abcd")),
    ],
)
def test_absolute_paths_are_found_wherever_they_begin(text, shared):
    (found,) = published({"a": [text]})["a"]
    digest = "" if shared == text else "[0-9a-f]{8}"
    assert re.fullmatch(re.escape(shared) + digest, found)


@pytest.mark.usefixtures("undrawn")
def test_runs_on_other_folders_of_the_same_name_stay_apart(here):
    for root in ("data", "other"):
        stream = {"name": "DomainFolders", "folder": str(here / root / "pictures")}
        made_up("ridge", 0, [[0.9]], stream=stream).save(here / "runs" / root / "result.json")
    covon("report", "runs", "--zip")
    with zipfile.ZipFile(here / "report.zip") as archive:
        names = archive.namelist()
    assert sum(name.endswith(".toml") for name in names) == 2
    refused("report", here / "report.zip")  # results.jsonl is to be read
    shutil.unpack_archive(here / "report.zip", here / "got")
    covon("report", "got/results.jsonl", "-o", "again")
    assert (here / "again/table.md").read_bytes() == (here / "report/table.md").read_bytes()


def test_the_folder_of_data_may_end_like_a_digest(here):
    own(here / "data/pictures@20260314", "plain")
    stream = {"name": "DomainFolders", "folder": "pictures@20260314", "domains": ["day", "night"]}
    recipe = saved(short_recipe("ridge", stream=stream, model=NETWORK), here)
    listed = covon("data", "list", recipe, "--dataset-root", "data")
    assert "\nday,cat,test,pictures@20260314/day/cat/" in listed.stdout
    other = covon("data", "list", recipe, "--dataset-root", "data", "--set",
                  "stream.folder=pictures@0123abcd")  # fmt: skip
    assert ",test,pictures/day/cat/" in other.stdout
