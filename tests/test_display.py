"""What a user sees while runs go on."""

import io

import pytest
from made_up_results import made_up
from rich.console import Console
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.display import Display, _Progress
from covon_avalanche.experiment.grid import Event, Job
from covon_avalanche.experiment.result import Epoch

JOBS = [Job("covon", 0), Job("finetune", 0), Job("joint", 0)]


@pytest.fixture
def display():
    recipe = small_recipe({job.strategy: STRATEGIES[job.strategy] for job in JOBS}, epochs=4)
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    return Display(console, recipe, JOBS)


def seen(display):
    with display.console.capture() as capture:
        display.console.print(display._render())
    return capture.get()


def epoch(experience, number, **changes):
    known = {"loss": 0.25, "accuracy": 0.5, "images": 3000, "seconds": 2.0} | changes
    return Epoch(experience=experience, epoch=number, **known)


def test_every_run_has_a_line_with_what_it_is_doing(display):
    display.show(Event(JOBS[0], 1, epoch=epoch(1, 2), epochs=4))
    display.show(Event(JOBS[2], 0, epoch=epoch(0, 1), epochs=4))
    text = seen(display)
    (line,) = [line for line in text.splitlines() if "covon, seed 0" in line]
    for part in ("2/2", "3/4", "0.250", "50.0 %", "1,500"):
        assert part in line
    (line,) = [line for line in text.splitlines() if "joint, seed 0" in line]
    assert "1/1" in line  # all domains at once
    assert "2/4" in line
    assert "0 of 3 runs" in text


def test_runs_may_come_and_go_while_the_table_is_drawn(display, monkeypatch):
    draw, share = display._row, _Progress.share
    coming = iter([Event(JOBS[1], 1, accuracy=0.5), Event(JOBS[0], error="it broke")])

    def of_the_main_thread(part):
        def meanwhile(*arguments):
            if event := next(coming, None):
                display.show(event)
            return part(*arguments)

        return meanwhile

    display.show(Event(JOBS[0], 1, epoch=epoch(1, 2), epochs=4))
    display.show(Event(JOBS[2], 0, epoch=epoch(0, 1), epochs=4))
    monkeypatch.setattr(display, "_row", of_the_main_thread(draw))
    monkeypatch.setattr(_Progress, "share", of_the_main_thread(share))
    assert "covon, seed 0" in seen(display)
    assert "covon, seed 0" not in seen(display)


def test_finished_and_failed_runs_leave_the_table(display):
    display.show(Event(JOBS[0], 2, result=made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]])))
    display.show(Event(JOBS[1], 0, epoch=epoch(0, 0), epochs=4))
    display.show(Event(JOBS[1], error="it broke"))
    text = seen(display)
    assert "1 of 3 runs" in text
    assert "covon, seed 0" not in text
    assert "finetune, seed 0" not in text
    assert [event.error for event in display.failures] == ["it broke"]


def test_the_time_left_follows_from_the_speed_of_this_session(display, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    fresh = Display(display.console, display.recipe, JOBS[:1])
    fresh.show(Event(JOBS[0], 1, epoch=epoch(1, 0), epochs=4))  # taken up at 5 of 8 epochs
    now[0] = 110.0
    fresh.show(Event(JOBS[0], 1, epoch=epoch(1, 1), epochs=4))  # one epoch in ten seconds
    assert "0:20 left" in seen(fresh)


def test_elsewhere_there_is_a_line_per_domain_and_finished_run(display, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    plain = Display(Console(file=io.StringIO(), width=40), display.recipe, JOBS)
    with plain:
        plain.show(Event(JOBS[0], 0, epoch=epoch(0, 0), epochs=4))
        now[0] = 130.0
        plain.show(Event(JOBS[0], 0, epoch=epoch(0, 3), epochs=4))
        plain.show(Event(JOBS[0], 1, accuracy=0.9))
        plain.show(Event(JOBS[0], 2, result=made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]])))
        plain.show(Event(JOBS[2], 2, accuracy=0.7))
    assert plain.console.file.getvalue().splitlines() == [
        "covon, seed 0: domain 1/2, accuracy so far 90.00 %, 0:40 left",
        "covon, seed 0: A_T 80.00 %, 4.0 s",
        "joint, seed 0: domain 2/2, accuracy so far 70.00 %, ? left",
    ]
