"""The files of checkpoints."""

from pathlib import Path

import pytest
import torch

from covon_avalanche.experiment.checkpoint import (
    Point,
    load_checkpoint,
    save_checkpoint,
    stored_points,
)
from covon_avalanche.experiment.state import StateError


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    for point in (Point(1), Point(2)):
        save_checkpoint(tmp_path, point, {"a": torch.ones(3)}, "run")

    def part_of(path, content):
        with path.open("wb") as file:
            file.write(content[:50])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", part_of)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, Point(2), {"a": torch.zeros(3)}, "run")
    assert load_checkpoint(tmp_path, Point(2), "run")["a"].tolist() == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 2


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
