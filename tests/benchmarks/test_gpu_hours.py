"""The estimate of GPU hours follows from images, epochs and counted operations."""

import gpu_hours
import pytest


def test_hours_are_operations_at_the_assumed_throughput(monkeypatch):
    monkeypatch.setattr(gpu_hours, "vit_flops", lambda: (10**9, 3 * 10**9))
    rows = gpu_hours.hours().set_index("recipe")
    trained, tested = 409_832, 176_743  # of the cleaned DomainNet
    operations = 3e9 * 30 * trained + 1e9 * 6 * tested
    assert rows.loc["domainnet-vit", "operations"] == pytest.approx(operations)
    assert rows.loc["domainnet-vit", "hours"] == pytest.approx(operations / 100e12 / 3600)
    assert rows.loc["core50-vit", "images"] == 119_894
    steps = 10 * 30 * 235
    assert rows.loc["permuted-mnist-hard", "hours"] == pytest.approx(steps * 1e-3 / 3600)
    assert "`core50-vit`" in gpu_hours.table(rows.reset_index())


def test_a_vit_is_counted_forward_and_backward():
    forward, both = gpu_hours.vit_flops()
    assert forward == pytest.approx(2 * 17.6e9, rel=0.01)  # 17.6 billion multiplications
    assert both == pytest.approx(3 * forward, rel=0.02)
