"""The files of checkpoints."""

import multiprocessing
import os
import resource
import signal

import pytest
import torch

from covon_avalanche.experiment.checkpoint import (
    Point,
    load_checkpoint,
    save_checkpoint,
    stored_points,
)
from covon_avalanche.experiment.state import StateError


def on_a_full_disk(folder, size):
    """A limit on the size of files stands for it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        save_checkpoint(folder, Point(1), {"a": torch.zeros(50_000)}, "run")
    except OSError:
        os._exit(3)
    os._exit(0)


@pytest.mark.parametrize("size", [50, 50_000])
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, size):
    save_checkpoint(tmp_path, Point(1), {"a": torch.ones(3)}, "run")
    process = multiprocessing.get_context("fork").Process(
        target=on_a_full_disk, args=(tmp_path, size)
    )
    process.start()
    process.join()
    assert process.exitcode == 3
    assert load_checkpoint(tmp_path, Point(1), "run")["a"].tolist() == [1, 1, 1]
    assert not list(tmp_path.glob(".*.part"))


def test_two_points_between_and_two_inside_domains_are_kept(tmp_path):
    points = [Point(0, 1), Point(1), Point(2), Point(2, 1), Point(3), Point(3, 1), Point(3, 1, 7)]
    for point in [*points, Point(3, 2)]:
        save_checkpoint(tmp_path, point, {"a": torch.ones(3)}, "run")
    assert stored_points(tmp_path) == [Point(3, 2), Point(3, 1, 7), Point(3), Point(2)]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_state_that_torch_cannot_store_is_an_error_and_leaves_no_file(tmp_path):
    tensor = torch.ones(3)
    state = {"a": tensor, "b": tensor.view(torch.int32)}
    with pytest.raises(StateError, match=r"the state cannot be stored: .*different types"):
        save_checkpoint(tmp_path, Point(1), state, "run")
    assert not list(tmp_path.iterdir())
