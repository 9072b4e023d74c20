"""``covon search`` as a user calls it."""

import re
import shutil

import pandas as pd
import pytest
from small_recipes import STRATEGIES, saved, small_recipe
from terminal import covon, covon_when_both_are_ready, in_two_processes, refused

from covon_avalanche.cli import search
from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.experiment import grid
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.search import Search, searches_in
from covon_avalanche.experiment.search_space import Searched

pytestmark = pytest.mark.usefixtures("in_this_process")
STREAM = {"name": "PermutedDigits", "n_experiences": 2, "validation_size": 300}


def recipe_of(*names) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, epochs=1, stream=STREAM, searched={})


def test_the_command_writes_a_recipe_of_the_best(tmp_path, monkeypatch):
    """With as many trials as each strategy was searched with, whatever was searched before."""
    totals = []
    monkeypatch.setattr(
        search, "GridProgress", lambda console, n: totals.append(n) or GridProgress(console, n)
    )
    recipe = recipe_of("finetune", "ewc-star")
    stream = recipe.stream.model_copy(update={"validation_size": 200})
    held_out = recipe.model_copy(update={"stream": stream})
    arguments = ["search", saved(recipe, tmp_path), "--out", tmp_path, "--validation-size", 200]
    arguments += ["--dataset-root", tmp_path / "my data", "--strategies"]
    covon(*arguments, "finetune", "--trials", 1, "--seed", 77)
    first = covon(*arguments, "finetune", "--trials", 3, "--seed", 77)
    command = f"covon run {tmp_path}/best.toml --dataset-root '{tmp_path}/my data'"
    assert first.output.endswith(f"{tmp_path}/best.toml: {command}\n")
    best = load_recipe(str(tmp_path / "best.toml"))
    assert list(best.strategies) == ["finetune", "ewc-star"]
    assert list(best.searched) == ["finetune"]
    assert best.strategies["ewc-star"] == recipe.strategies["ewc-star"]
    assert not (tmp_path / "ewc-star").exists()
    other = [*arguments, "ewc-star", "--trials", 1, "--seed", 1000]
    done = covon(*other)
    assert done.stderr == ""
    best = load_recipe(str(tmp_path / "best.toml"))  # what was searched before stays
    assert list(best.searched) == list(best.strategies) == ["finetune", "ewc-star"]
    assert best.name == f"{recipe.name}-searched"  # runs beside those of the recipe
    assert best.stream == recipe.stream
    for name, trials, seed in ("finetune", 3, 77), ("ewc-star", 1, 1000):
        settings, how = Search(held_out, name, tmp_path, seed, trials).best()
        assert best.searched[name] == how
        assert how.trials == trials
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name}  ")]
        assert f" {trials}/{trials} " in row
        assert f" {100 * how.accuracy:.2f} " in row
        assert settings.items() <= best.strategies[name].model_dump().items()
    covon(*other)  # nothing is left to do
    assert totals[:3] == [1, 2, 1]  # the bar of all trials leaves out those that have ended
    done = covon(*other, "--epochs", 2)
    says = "no trial of finetune was completed with these settings, .*; finetune keeps the recipe's"
    assert re.search(says, done.stderr)  # the table shows those of one epoch
    assert list(load_recipe(str(tmp_path / "best.toml")).searched) == ["ewc-star"]


def test_a_strategy_with_nothing_to_search_keeps_its_settings(tmp_path):
    file = saved(recipe_of("ncm", "finetune"), tmp_path)
    arguments = ["search", file, "--trials", 1, "--out", tmp_path]
    covon(*arguments)
    assert load_recipe(str(tmp_path / "best.toml")).searched["ncm"].trials == 0
    assert not (tmp_path / "ncm").exists()
    for more, others in ([], ""), (["--strategies", "finetune,ncm"], "ncm: nothing to search\n"):
        done = covon(*arguments, *more)
        assert others in done.stdout
        best = load_recipe(str(tmp_path / "best.toml"))
        assert list(best.strategies) == ["ncm", "finetune"]
        assert best.strategies["ncm"] == recipe_of("ncm").strategies["ncm"]
    sentence = refused(*arguments, "--strategies", "ncm")
    assert "ncm: nothing to search; give ranges in [search.STRATEGY]" in sentence


def test_strategies_searched_before_stay_so_however_long_the_name_of_the_recipe(tmp_path):
    names, how = ("finetune", "ewc-star"), Searched(trials=5, accuracy=0.5)
    changes = {"name": 100 * "a", "searched": dict.fromkeys(names, how)}
    recipe = recipe_of(*names).model_copy(update=changes)
    arguments = ["--trials", 1, "--out", tmp_path / "s", "--strategies", "finetune"]
    covon("search", saved(recipe, tmp_path), *arguments)
    best = load_recipe(str(tmp_path / "s/best.toml"))
    assert {name: best.searched[name].trials for name in names} == {"finetune": 1, "ewc-star": 5}
    assert best.name == 90 * "a" + "-searched"


def test_a_seed_that_will_be_reported_is_remarked_upon(tmp_path, monkeypatch):
    def no_pool(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grid, "WorkerPool", no_pool)
    for seed, lines in (("0", 1), ("1000", 0)):
        done = covon("search", "permuted-digits", "--seed", seed, status=130)
        assert "permuted-digits holds out no images: using --validation-size 0.2\n" in done.stdout
        assert len(done.stderr.splitlines()) == lines
        assert ("--seed 0 is one of the recipe's seeds" in done.stderr) == lines


def test_ctrl_c_ends_a_search_and_leaves_its_trial_to_be_resumed(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpointer, "_store", interrupt)
    recipe = recipe_of("finetune", "ewc-star")
    search = Search(recipe, "finetune", tmp_path / "s", 77, 1)
    command = ["search", saved(recipe, tmp_path), "--seed", 77, "--trials", 1]
    done = covon(*command, "--out", tmp_path / "s", status=130)
    assert "Interrupted; the same command resumes from here." in done.stdout
    assert search.trial(search.plan()[0]).state()[0] == "interrupted"


def test_several_commands_share_the_trials(tmp_path):
    file = saved(recipe_of("finetune"), tmp_path)
    command = ["search", file, "--jobs", "1", "--trials", "6", "--out", tmp_path / "s"]
    in_two_processes(covon_when_both_are_ready, command, str(tmp_path))
    outputs = [(tmp_path / f"printed-{rank}.txt").read_text("utf-8") for rank in range(2)]
    (search,) = searches_in(tmp_path / "s")
    trials = [search.trial(settings) for settings in search.plan()]
    assert [(trial.starts, trial.state()[0]) for trial in trials] == [(1, "finished")] * len(trials)
    assert all(f" {len(trials)}/{len(trials)} " in output for output in outputs)


@pytest.mark.usefixtures("undrawn")
def test_the_state_of_a_search_is_shown_and_its_report_has_the_trials_and_what_was_best(tmp_path):
    folder, out = tmp_path / "mine", tmp_path / "report"
    file = saved(recipe_of("finetune", "ewc-star"), tmp_path)
    covon("search", file, "--trials", 2, "--out", folder)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    for command in ("status", "show"):
        shown = covon(command, folder)
        rows = [re.split(r"\s{2,}", line) for line in shown.stdout.splitlines()[2:]]
        assert [row[0] for row in rows] == ["finetune", "ewc-star"]
        assert [row[1] for row in rows] == ["2/2", "2/2"]
        assert all(row[4].startswith("lr 0.") for row in rows)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))

    another = shutil.copytree(folder, tmp_path / "another" / "mine")  # of the same name
    covon("report", folder, another, "--out", out)
    table = pd.read_csv(folder / "trials.csv")
    assert table["strategy"].tolist() == ["finetune"] * 2 + ["ewc-star"] * 2
    assert table["accuracy"].between(0, 1).all()
    for name in ("search-mine.csv", "search-mine-2.csv"):
        pd.testing.assert_frame_equal(table, pd.read_csv(out / name))
    page, second = (out / "index.html").read_text().split("<h2>Search mine-2</h2>")
    assert all(name in second for name in table["strategy"])
    rows = re.findall(r'<tr><th scope="row"><span class="name">(.*)</span></th>(.*)</tr>', page)
    cells = [[name, *re.findall("<td>(.*?)</td>", rest)] for name, rest in rows]
    searched = load_recipe(str(folder / "best.toml")).searched
    assert [row[0] for row in cells] == [*searched, *table["strategy"]]
    for row, how in zip(cells, searched.values(), strict=False):
        assert row[1:4] == ["2/2", "0", f"{100 * how.accuracy:.2f}"]
        assert row[5] == ", ".join(how.at_end)
    assert [float(row[3]) for row in cells[2:]] == pytest.approx(table["accuracy"], rel=1e-5)
    assert (out / "figures/search-mine.svg").is_file()
    assert str(tmp_path) not in page
    assert not (out / "table.md").exists()


def test_a_strategy_that_diverges_leaves_the_others_their_results(tmp_path):
    recipe = recipe_of("finetune", "ewc-star")
    file = saved(recipe, tmp_path)
    file.write_text(file.read_text() + "\n[search.ewc-star]\nlr = { low = 1e30, high = 1e33 }\n")
    done = covon("search", file, "--trials", 2, "--out", tmp_path / "s")
    assert "all trials of ewc-star have failed" in done.stderr
    best = load_recipe(str(tmp_path / "s/best.toml"))
    assert list(best.searched) == ["finetune"]
    assert best.strategies["ewc-star"] == recipe.strategies["ewc-star"]
    alone = ["--trials", 2, "--out", tmp_path / "t", "--strategies", "ewc-star"]
    covon("search", file, *alone, status=1)


def test_runs_and_searches_do_not_share_a_folder(tmp_path):
    """A run and a trial of the same settings and seed would share their files."""
    file = saved(recipe_of("finetune"), tmp_path)
    searching = ["search", file, "--trials", 1, "--out"]
    run = ["run", file, "--seeds", 0, "--out"]
    covon(*searching, tmp_path / "s")
    covon(*run, tmp_path / "r")
    interrupted = tmp_path / "interrupted"  # before the first result
    shutil.copytree(tmp_path / "r/finetune", interrupted / "finetune")
    next(interrupted.rglob("result.json")).unlink()
    for command, folder, says in (
        (run, tmp_path / "s", "has trials of `covon search`: choose another --out"),
        (searching, tmp_path / "r", "has runs of `covon run`: choose another --out"),
        (searching, interrupted, "has runs of `covon run`: choose another --out"),
    ):
        assert f"{folder} {says}" in refused(*command, folder)


def test_runs_and_trials_with_the_data_of_another_folder_are_not_used(tmp_path):
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        (root / "PACS").mkdir(parents=True)
    begun = RunFolder(tmp_path / "r", load_recipe("pacs"), "finetune", 0, roots[0])
    first = Search(load_recipe("pacs"), "finetune", tmp_path / "s", 1000, 3, roots[0])
    for folder in (begun, first.trial(first.plan()[0])):
        folder.path.mkdir(parents=True)
        folder.write_start({})
    first.store()
    for command, out in ("run", "r"), ("search", "s"):
        options = ["--strategies", "finetune", "--dataset-root", roots[1], "--out", tmp_path / out]
        says = rf"used {roots[0]}/PACS, not {roots[1]}/PACS: choose another --out"
        says = rf"covon: {tmp_path / out}/finetune/seed-[-0-9a-f]+ {says}"
        assert re.fullmatch(says, refused(command, "pacs", *options))
