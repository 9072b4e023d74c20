"""Both optimizers are timed in turns, from one forward pass to the next."""

from types import SimpleNamespace

import loop_overhead
import pytest

from covon_avalanche import CoVON


def test_what_a_loop_does_between_forward_passes_counts(monkeypatch):
    order, now = [], [0.0]
    monkeypatch.setattr(loop_overhead, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def loop(model, optimizer, data, mb_size):
        covon = isinstance(optimizer, CoVON)
        order.append(covon)
        now[0] += 5  # before the first step: not counted
        for x, _ in data:
            model(x[None])
            now[0] += len(order) * (3 if covon else 2)  # the machine becomes slower

    monkeypatch.setattr(loop_overhead, "LOOPS", {"a loop": loop})
    case = loop_overhead.Case.__init__

    def one_image(self, *arguments):
        case(self, *arguments)
        self.steps *= self.mb_size  # this loop steps by single images

    monkeypatch.setattr(loop_overhead.Case, "__init__", one_image)
    (row,) = loop_overhead.measure(short=True, rounds=3)
    assert order == [True, False, False, True, True, False, False, True]
    rounds = [(2 * 3, 3 * 4), (2 * 6, 3 * 5), (2 * 7, 3 * 8)]  # without the first
    assert (row["adamw_seconds"], row["covon_seconds"]) == (12, 15)
    assert row["ratio"] == pytest.approx(sorted(c / a for a, c in rounds)[1], abs=1e-4)
    assert "1.714" in loop_overhead.table([row]).splitlines()[-1]


def test_a_step_of_a_real_loop_is_one_forward_pass():
    for covon in (False, True):
        case = loop_overhead.Case(loop_overhead.plain, covon, short=True)
        assert 0 < case.seconds() < 5
        case.steps += 1
        with pytest.raises(RuntimeError, match="6 steps are one forward pass each"):
            case.seconds()
