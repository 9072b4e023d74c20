"""The progress of a grid, read from files."""

import io

import pytest
from made_up_results import made_up
from rich.console import Console
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.experiment.grid import Outcome
from covon_avalanche.experiment.run_folder import RunFolder, Status

NAMES = ("covon", "finetune")
RESULT = made_up("covon", 0, [[0.9, 0.1], [0.8, 0.8]])


@pytest.fixture
def grid(tmp_path):
    """A display with a clock, a function that writes a run's state, and the folders of two runs."""
    recipe = small_recipe({name: STRATEGIES[name] for name in NAMES}, epochs=4)
    folders = [RunFolder(tmp_path, recipe, name, 0) for name in NAMES]

    def write(folder, experience, number):
        folder.path.mkdir(parents=True, exist_ok=True)
        share = experience / 2 + (number + 1) / 8
        text = f"domain {experience + 1}/2, epoch {number + 1}/4, loss 0.250"
        known = {"of_domains": 2, "domains": experience, "accuracy": 0.625}
        folder.write_status(Status(**known, share=share, text=text))

    def make(terminal, now=(0.0,), width=150):
        clock = {"get_time": lambda: now[-1]}
        console = Console(file=io.StringIO(), force_terminal=terminal, width=width, **clock)
        return GridProgress(console, len(folders))

    return make, write, folders


def seen(progress):
    console = progress.bars.console
    with console.capture() as capture:
        console.print(progress.bars.get_renderable())
    return capture.get().splitlines()


def test_titles_are_no_markup(grid, monkeypatch):
    make, _, folders = grid
    monkeypatch.setattr(RunFolder, "title", "own, trial 2 (arguments.mode [/b])")
    progress = make(terminal=True)
    progress.poll(folders[:1], [])
    assert "own, trial 2 (arguments.mode [/b])" in seen(progress)[1]


def test_warnings_about_the_data_come_with_the_first_status(grid, recwarn):
    make, write, folders = grid
    progress = make(terminal=False)
    for folder in folders:
        write(folder, 0, 0)
        folder.check_data({"train": [10]}, ["half of the images"])
    progress.poll(folders, [])
    progress.poll(folders, [])
    assert [str(warning.message) for warning in recwarn] == ["half of the images"]


def test_every_run_in_progress_has_a_line_with_its_state(grid):
    make, write, folders = grid
    progress = make(terminal=True)
    write(folders[0], 1, 1)
    progress.poll(folders, [])  # the second has no state yet
    overall, covon, finetune = seen(progress)
    assert "all runs" in overall
    assert "38 %" in overall  # 0.75 of two runs
    assert "finetune, seed 0" in finetune
    assert "starting" in finetune
    for part in ("covon, seed 0", "75 %", "domain 2/2", "epoch 2/4", "0.250"):
        assert part in covon
    progress.end(Outcome(folders[0], RESULT))
    overall, _ = seen(progress)
    assert "50 %" in overall
    progress.end(Outcome(folders[1], error="it broke"))
    assert [outcome.folder for outcome in progress.outcomes] == folders
    assert "A_T" not in progress.bars.console.file.getvalue()


def test_a_terminal_of_80_columns_has_room_for_name_share_and_time(grid, monkeypatch):
    make, write, folders = grid
    progress = make(terminal=True, width=80)
    title = "covon, trial 12 (lr 0.0001234, weight_decay 1e-05, gamma 0.3333)"
    monkeypatch.setattr(RunFolder, "title", property(lambda run: title))
    write(folders[1], 1, 1)
    text = "domain 2/2, epoch 2/4, batch 7/23, loss 0.250, accuracy 96.9 %, 8,184 images/s"
    folders[1].write_status(folders[1].status().model_copy(update={"text": text}))
    progress.poll(folders, [])
    overall, _, trial = seen(progress)
    assert "38 %" in overall
    for part in ("covon, trial 12 (lr 0.0", "… ", " 75 % ", "-:--:--", " domain 2/2, epoch 2/4, "):
        assert part in trial


def test_the_time_left_follows_from_the_speed_of_this_session(grid):
    make, write, folders = grid
    now = [100.0]
    progress = make(terminal=True, now=now)
    for number in range(3):  # resumed after 5 of 8 epochs; an epoch in ten seconds
        write(folders[0], 1, number)
        progress.poll(folders[:1], [])
        now.append(now[-1] + 10)
    assert "0:00:10" in seen(progress)[1]


def test_without_a_terminal_there_is_a_line_per_domain_and_finished_run(grid):
    make, write, folders = grid
    progress = make(terminal=False)
    with progress.bars:
        for number in range(3):
            write(folders[0], 1, number)
            progress.poll(folders[:1], [])
        progress.end(Outcome(folders[0], RESULT))
        progress.end(Outcome(folders[1], error="it broke"))
    assert progress.bars.console.file.getvalue().splitlines() == [
        "covon, seed 0: domain 1/2, A_t 62.50 %",
        "covon, seed 0: A_T 80.00 %, 4.0 s",
    ]
