"""The progress of a grid, read from files."""

import io

import pytest
from made_up_results import made_up
from rich.console import Console
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.experiment.grid import Outcome, RunSpec
from covon_avalanche.experiment.result import Epoch
from covon_avalanche.experiment.run_folder import RunFolder, Status

SPECS = [RunSpec("covon", 0), RunSpec("finetune", 0), RunSpec("joint", 0)]
RESULT = made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]])


@pytest.fixture
def now():
    """The clock of the bars."""
    return [100.0]


@pytest.fixture
def grid(tmp_path, now):
    """Makes the display, and a function that writes a run's state as a worker does."""
    recipe = small_recipe({spec.strategy: STRATEGIES[spec.strategy] for spec in SPECS}, epochs=4)

    def write(spec, **status):
        folder = RunFolder(tmp_path, recipe, *spec)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_status(Status(of_epochs=4, **({"of_domains": 2} | status)))

    def make(terminal):
        console = Console(
            file=io.StringIO(), force_terminal=terminal, width=150, get_time=lambda: now[0]
        )
        return GridProgress(console, recipe, SPECS, tmp_path)

    return make, write


def epoch(experience, number):
    return Epoch(
        experience=experience, epoch=number, loss=0.25, accuracy=0.5, images=3000, seconds=2.0
    )


def seen(progress):
    with progress.console.capture() as capture:
        progress.console.print(progress._bars.get_renderable())
    return capture.get().splitlines()


def test_every_run_in_progress_has_a_line_with_what_it_is_doing(grid, now):
    make, write = grid
    progress = make(terminal=True)
    write(SPECS[0], domains=1, epoch=epoch(1, 1))
    write(SPECS[2], epoch=epoch(0, 1), of_domains=1)
    write(SPECS[1], domains=1)  # from an earlier session, and not yet resumed
    progress.poll([SPECS[0], SPECS[2]])
    overall, covon, joint = seen(progress)
    assert "0 of 3 runs" in overall
    assert "42 %" in overall  # 3/4 and 1/2 of three runs
    for part in ("covon, seed 0", "75 %", "domain 2/2", "epoch 2/4", "0.250", "50.0 %", "1,500"):
        assert part in covon
    for part in ("joint, seed 0", "50 %", "domain 1/1", "epoch 2/4"):
        assert part in joint


def test_ended_runs_leave_the_display(grid, now):
    make, write = grid
    progress = make(terminal=True)
    for spec in SPECS[:2]:
        write(spec, epoch=epoch(0, 0))
    progress.poll(SPECS[:2])
    assert len(seen(progress)) == 3
    progress.end(Outcome(SPECS[0], RESULT))
    progress.end(Outcome(SPECS[1], error="it broke"))
    (overall,) = seen(progress)
    assert "2 of 3 runs" in overall
    assert [outcome.spec for outcome in progress.outcomes] == SPECS[:2]
    assert "A_T" not in progress.console.file.getvalue()


def test_the_time_left_follows_from_the_speed_of_this_session(grid, now):
    make, write = grid
    progress = make(terminal=True)
    progress.poll(SPECS[:1])
    now[0] = 107.0
    write(SPECS[0], domains=1, epoch=epoch(1, 0))  # resumed: 5 of 8 epochs
    progress.poll(SPECS[:1])
    for number in (1, 2):
        now[0] += 10.0  # an epoch in ten seconds
        write(SPECS[0], domains=1, epoch=epoch(1, number))
        progress.poll(SPECS[:1])
    assert "0:00:10" in seen(progress)[1]


def test_without_a_terminal_there_is_a_line_per_domain_and_finished_run(grid, now):
    make, write = grid
    progress = make(terminal=False)
    with progress:
        for number in range(3):
            write(SPECS[0], epoch=epoch(0, number))
            progress.poll(SPECS[:1])
            progress.poll(SPECS[:1])
            now[0] += 10.0
        write(SPECS[0], domains=1, accuracy=0.9, epoch=epoch(0, 3))
        progress.poll(SPECS[:1])
        progress.end(Outcome(SPECS[0], RESULT))
        write(SPECS[2], domains=1, of_domains=1, accuracy=0.7)
        progress.poll(SPECS[2:])
    assert progress.console.file.getvalue().splitlines() == [
        "covon, seed 0: domain 1/2, accuracy so far 90.00 %, 0:00:40 left",
        "covon, seed 0: A_T 80.00 %, 4.0 s",
        "joint, seed 0: domain 1/1, accuracy so far 70.00 %, 0:00:00 left",
    ]
