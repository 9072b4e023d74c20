"""What a run ran on."""

import torch

from covon_avalanche.experiment import machine


def test_memory_and_name_are_those_of_the_device(monkeypatch):
    def of_device(device):
        return int(device.removeprefix("cuda:"))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("get_device_name", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, of_device)
    machine.reset_peak_memory("cuda:7")
    assert machine.peak_memory("cuda:7") == 7
    assert machine.machine("cuda:7")["accelerator"] == 7
    assert "accelerator" not in machine.machine("cpu")
