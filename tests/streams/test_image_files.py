"""Which files are images, and which folders are searched."""

from miniature import paint
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from covon_avalanche.streams.image_datasets import decode_pixels
from covon_avalanche.streams.image_files import SUFFIXES, class_folders, image_files


def test_links_count_but_not_in_a_circle(tmp_path):
    elsewhere, root = tmp_path / "elsewhere" / "cat", tmp_path / "day"
    paint(elsewhere / "0.png", 0)
    paint(root / "fox" / "0.png", 1)
    (root / "fox" / "1.png").symlink_to(elsewhere / "0.png")
    (root / "fox" / "circle").symlink_to(root)
    (root / "fox" / "gone").symlink_to(root / "nowhere")
    (root / "fox" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "fox" / "more").symlink_to(elsewhere)
    (root / "cat").symlink_to(elsewhere)
    found = class_folders(root, ["cat", "fox"]).files
    expected = ["cat/0.png", "fox/0.png", "fox/1.png", "fox/more/0.png"]
    assert found == [root / name for name in expected]


def test_folders_linked_with_each_other_are_no_circle(tmp_path):
    root, elsewhere = tmp_path / "day", tmp_path / "elsewhere"
    for name in ("cat", "fox"):
        paint(root / name / "0.png", 0)
        (root / name / "more").symlink_to(elsewhere)
    paint(elsewhere / "1.png", 0)
    (elsewhere / "back").symlink_to(root / "cat")
    expected = ["cat/0.png", "cat/more/1.png"]
    assert image_files(root / "cat") == [root / name for name in expected]
    assert root / "fox/more/1.png" in class_folders(root, ["cat", "fox"]).files


def test_all_that_torchvision_takes_for_images_is_found_and_decoded(tmp_path):
    assert {*SUFFIXES} == {*IMG_EXTENSIONS}
    for suffix in SUFFIXES:
        Image.new("L" if suffix == ".pgm" else "RGB", (4, 4)).save(tmp_path / f"1{suffix.upper()}")
    files = image_files(tmp_path)
    assert len(files) == len(SUFFIXES)
    assert all(decode_pixels(file).shape == (3, 4, 4) for file in files)


def test_what_is_hidden_does_not_count(tmp_path):
    for name in ("1.jpg", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg", "a/.b/c/1.jpg"):
        paint(tmp_path / ".data" / "cat" / name, 0)
    found = class_folders(tmp_path / ".data", ["cat"]).files
    assert found == [tmp_path / ".data" / "cat" / "1.jpg"]
