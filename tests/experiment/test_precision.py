"""The precision and the machine of a run: chosen, recorded, with a warning where it is slow."""

from unittest.mock import MagicMock

import pytest
import torch
from small_recipes import run_strategy, short_recipe

from covon_avalanche.experiment import machine, precision
from covon_avalanche.report import results_frame


@pytest.fixture
def processor(monkeypatch):
    """Pretends that ``/proc/cpuinfo`` has these flags."""

    def pretend(flags):
        fields = {"flags": f"fpu avx2 {flags}"}
        monkeypatch.setattr(precision, "cpuinfo", lambda key: fields.get(key, ""))

    return pretend


def run(name):
    recipe = short_recipe("covon", precision=name, epochs=1)  # of float32 weights
    return run_strategy(recipe, "covon", 0)


def test_auto_is_bfloat16_where_the_processor_has_it(processor):
    rounded, exact = run("bfloat16"), run("float32")
    assert rounded.epochs[0].loss != exact.epochs[0].loss
    assert rounded.epochs[0].loss == pytest.approx(exact.epochs[0].loss, rel=0.05)
    known = {"avx512_bf16": rounded, "amx_bf16 amx_tile": rounded, "avx512f": exact}
    for flags, expected in known.items():
        processor(flags)
        result, used = run("auto"), expected.machine["precision"]
        assert result.accuracy == expected.accuracy
        assert result.epochs[0].loss == expected.epochs[0].loss
        assert result.settings["precision"] == "auto"
        assert result.machine["precision"] == used
        (row,) = results_frame([result]).to_dict("records")
        assert row["settings.precision"] == used  # so that it is compared with its like


def test_bfloat16_on_a_processor_without_it_is_slow(processor):
    processor("avx512f")
    assert precision.is_slow("bfloat16", "cpu")
    processor("amx_bf16")
    assert not precision.is_slow("bfloat16", "cpu")


def test_an_accelerator_is_asked_without_emulation(monkeypatch):
    cuda = MagicMock()
    cuda.is_bf16_supported.return_value = False
    monkeypatch.setattr(torch, "cuda", cuda)
    assert precision.used_precision("auto", "cuda:1") == "float32"
    calls = [name for name, *_ in cuda.mock_calls]
    assert calls[:3] == ["device", "device().__enter__", "is_bf16_supported"]
    cuda.device.assert_called_once_with("cuda:1")
    cuda.is_bf16_supported.assert_called_once_with(including_emulation=False)
    assert precision.used_precision("auto", "mps") == "float32"


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
