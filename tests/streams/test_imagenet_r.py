"""ImageNet-R: renditions as domains, class ids, the split, lists."""

import pytest
import torch
from miniature import IMAGENET_R_CODES, check_labels, imagenet_r, open_stream, paint, seen

from covon_avalanche.datasets.verify import verify
from covon_avalanche.domain_orders import IMAGENET_R
from covon_avalanche.streams import ImageNetR
from covon_avalanche.streams.imagenet_r import CLASSES, COUNTS

THREE = list(IMAGENET_R_CODES)


@pytest.fixture
def root(tmp_path):
    return imagenet_r(tmp_path)


def test_facts():
    assert len(CLASSES) == 200
    assert list(CLASSES) == sorted(set(CLASSES))
    assert tuple(COUNTS) == IMAGENET_R == tuple(sorted(IMAGENET_R))
    assert len(IMAGENET_R) == 15
    assert sum(COUNTS.values()) == 30_000


def test_a_fifth_of_each_class_and_domain_is_for_testing(root):
    benchmark = open_stream(ImageNetR, root, domains=THREE[::-1])
    check_labels(benchmark, IMAGENET_R_CODES)
    assert [e.domain for e in benchmark.train_stream] == THREE[::-1]
    assert benchmark.n_classes == 200
    for stream, images in (("train", 8), ("test", 2)):
        for experience in benchmark.streams[stream]:
            counts = torch.tensor(list(experience.dataset.targets)).bincount()
            assert set(counts.tolist()) == {0, images}
    assert set(benchmark.train_stream[0].classes_in_this_experience) == {7}
    assert set(benchmark.train_stream[1].classes_in_this_experience) == {0, 1, 7, 199}


def test_the_split_depends_on_its_own_seed_only(root):
    def tested(**options):
        images = open_stream(ImageNetR, root, domains=THREE, **options).images["test"]
        return {file for part in images.values() for file in part.files}

    first = tested()
    assert tested(seed=5) == first
    assert len(tested(split_seed=1)) == len(first)
    assert tested(split_seed=1) != first


def test_class_ids_are_not_those_of_the_lists(root):
    name = CLASSES[7]
    for part, numbers in (("train", (4, 2)), ("test", (3,))):
        lines = [f"{name}/art_{i}.jpg 135\n" for i in numbers]
        (root / f"art_{part}.txt").write_text("".join(lines))
    benchmark = open_stream(ImageNetR, root, domains=["art", "sketch"])
    assert seen(benchmark.train_stream[0]) == [(7, 7, 1)] * 2
    assert [f.name for f in benchmark.images["train"]["art"].files] == ["art_4.jpg", "art_2.jpg"]
    assert len(benchmark.train_stream[1].dataset) == 32  # sketch has no lists


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("n00000000/art_0.jpg 1", "art_train.txt, line 1: expected a path CLASS/FILE"),
        ("n01443537/sketch_0.jpg 0", "art_train.txt has images of other domains than 'art': .*sk"),
    ],
)
def test_lists_of_something_else_are_refused(root, line, error):
    for part in ("train", "test"):
        (root / f"art_{part}.txt").write_text(line)
    with pytest.raises(ValueError, match=error):
        open_stream(ImageNetR, root, domains=["art"])


def test_missing_images_and_classes_are_named(root):
    with pytest.warns(UserWarning, match="sketch should have 4634 images, found 40"):
        ImageNetR(dataset_root=root, domains=["sketch"])
    with pytest.raises(ValueError, match="'origami' has no images"):
        open_stream(ImageNetR, root, domains=["origami"])


def test_verify_names_images_of_no_domain(root):
    strange = root / "n01443537" / "photo_0.jpg"
    paint(strange, 0)
    report = verify(ImageNetR, root, domains=THREE)
    assert len(report.entries) == 90
    assert report.extra == [strange]
