"""A container's share of the machine."""

import os

import pytest

from covon_avalanche import cores


def limited(tmp_path, monkeypatch, files: dict[str, str], machine: int = 8) -> int:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(machine)), raising=False)
    return cores.usable_cores()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 8),  # more than there is
        ("what is this\n", 8),
    ],
)
def test_version_2_of_cgroups(tmp_path, monkeypatch, text, expected):
    assert limited(tmp_path, monkeypatch, {"cpu.max": text}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", 8), ("300000\n", 3)])
def test_version_1_of_cgroups(tmp_path, monkeypatch, quota, expected):
    files = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000\n"}
    assert limited(tmp_path, monkeypatch, files) == expected


def test_without_limits_the_cores_that_the_process_may_use_count(tmp_path, monkeypatch):
    assert limited(tmp_path, monkeypatch, {}, machine=3) == 3
