"""``covon search``."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli.options import (
    BAD_INPUT,
    INTERRUPTED,
    DatasetRoot,
    Epochs,
    Jobs,
    RecipeName,
    Settings,
    Strategies,
    fail,
    joined,
    missing_sentence,
    need,
)
from covon_avalanche.cli.show import print_searches
from covon_avalanche.experiment.recipe import Recipe, RecipeError, choose, load_recipe, recipe_text
from covon_avalanche.experiment.run_folder import error_sentence, is_bad_input
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.search_space import Searched
from covon_avalanche.experiment.worker_pool import (
    WorkerPool,
    default_processes,
    ignore_imports_in_gc,
)
from covon_avalanche.safe_text import csv_text

_HELD_OUT = 0.2  # of the training images, where the recipe holds out none
_SUFFIX = "-searched"

if TYPE_CHECKING:
    from covon_avalanche.experiment.search import Search


def search(
    recipe: RecipeName,
    strategies: Strategies = None,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Trials per strategy.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Do not report it.")] = 1000,
    validation_size: Annotated[
        float | None,
        typer.Option(metavar="SIZE", min=0, help="Held out: a number or share."),
    ] = None,
    epochs: Epochs = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Trials. \\[default: searches/RECIPE]"),
    ] = None,
    jobs: Jobs = None,
    dataset_root: DatasetRoot = None,
    settings: Settings = None,
) -> None:
    """Choose hyperparameters on validation images, by the same protocol for every strategy.

    First five learning rates on a logarithmic grid, and more while the best is at an end of it;
    then all settings, with learning rates near the best. Ranges are in the recipe's
    \\[search.STRATEGY] tables, such as lr = { low = 1e-4, high = 1e-1 }; without one, from a tenth
    to ten times each positive setting on an unbounded scale (lr, weight_decay, ess, strength and
    others). A strategy without any keeps its settings. A recipe that holds out no validation
    images gets a fifth of the training images.

    Trials are kept in FOLDER/trials.journal: the same command resumes after an interruption, and
    several machines that share the folder work on the same trials; `covon status FOLDER` shows
    them. The best settings go to FOLDER/best.toml, a recipe.
    """
    need("optuna", "covon search", "'covon_avalanche[search]'")
    changes = list(settings or ())
    given = choose(load_recipe(recipe, changes), epochs=epochs)
    if validation_size is None and not given.stream.validation_size:
        validation_size = _HELD_OUT
        typer.echo(f"{given.name} holds out no images: --validation-size {_HELD_OUT}")
    if validation_size is not None:
        changes.append(f"stream.validation_size={validation_size:.12g}")
    held_out = choose(load_recipe(recipe, changes), epochs=epochs)
    chosen = choose(held_out, joined(strategies))
    if seed in chosen.seeds:
        typer.echo(
            f"covon: --seed {seed} is one of the recipe's seeds: results of this seed will be "
            "biased, because settings were chosen with it",
            err=True,
        )
    if (missing := missing_sentence(chosen, dataset_root)) is not None:
        fail(missing)
    folder = out or Path("searches") / chosen.name
    folder.mkdir(parents=True, exist_ok=True)
    import optuna

    from covon_avalanche.experiment.search import Search, space_of
    from covon_avalanche.experiment.search_journal import read_trials

    searches = {
        name: Search(held_out, name, folder / "trials.journal", seed)
        for name in held_out.strategies
        if space_of(held_out, name)
    }
    wanted = [searches[name] for name in chosen.strategies if name in searches]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not wanted:
        fail(f"{', '.join(chosen.strategies)}: nothing to search; give ranges in [search.STRATEGY]")
    for search in wanted:
        search.announce(trials)
        search.study.set_user_attr("used", time.time())  # of several, status shows the latest
    workers = jobs or default_processes(chosen.device)
    _run_trials(wanted, trials, RunOptions(dataset_root=dataset_root), workers)
    best = _best(given, searches, wanted, trials)
    write_atomically(folder / "best.toml", recipe_text(best))
    write_atomically(folder / "trials.csv", csv_text(read_trials(folder / "trials.journal")))
    print_searches(folder / "trials.journal")
    for name, found in best.searched.items():
        if found.at_end:
            typer.echo(
                f"{name}: the best {' and '.join(found.at_end)} lies at an end of what was tried"
            )
    typer.echo(f"{folder}/best.toml: covon run {folder}/best.toml")


def _run_trials(searches: list[Search], trials: int, options: RunOptions, workers: int) -> None:
    """Run missing trials in several processes, each of which begins with another strategy."""
    shares = [searches[i % len(searches) :] + searches[: i % len(searches)] for i in range(workers)]
    killed = False
    try:
        with WorkerPool(workers) as pool:
            futures = [pool.submit(_work, share, trials, options) for share in shares]
            for future in as_completed(futures):
                try:
                    failure = future.result()
                except BrokenProcessPool:
                    killed = True  # the other workers repeat its trial
                    continue
                if failure is not None:
                    sentence, bad_input = failure
                    fail(sentence, BAD_INPUT if bad_input else 1)
    except KeyboardInterrupt:
        for search in searches:
            search.forgive()
        typer.echo("Interrupted; the same command resumes from here.")
        raise typer.Exit(INTERRUPTED) from None
    if killed and not all(search.is_finished(trials) for search in searches):
        fail(
            "a process was killed, perhaps out of memory; the trials in "
            f"{searches[0].journal} are kept, and the same command resumes the search",
            status=1,
        )


def _work(searches: list[Search], trials: int, options: RunOptions) -> tuple[str, bool] | None:
    """Search in a worker; return the error, if any."""
    try:
        warnings.filterwarnings("ignore")
        import optuna

        import covon_avalanche.experiment.run  # noqa: F401  which each trial needs
        from covon_avalanche.experiment.search import run_searches

        ignore_imports_in_gc()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        run_searches(searches, trials, options, notify=partial(print, flush=True))
    except (Exception, SystemExit) as error:
        return error_sentence(error), is_bad_input(error)
    return None


def _best(recipe: Recipe, searches: dict[str, Search], wanted: list[Search], trials: int) -> Recipe:
    """The recipe with the best settings of all strategies searched so far."""
    from covon_avalanche.experiment.search import with_settings

    failed, found = "", False
    searched = {name: Searched(trials=0) for name in recipe.strategies.keys() - searches.keys()}
    for name, search in searches.items():
        if search not in wanted and not search.exists():
            continue
        try:
            settings, searched[name] = search.best(trials)
        except RecipeError as error:
            if search in wanted:
                failed = f"{error}; {name} keeps the recipe's settings"
                typer.echo(f"covon: {failed}", err=True)
            continue
        found = found or search in wanted
        recipe = with_settings(recipe, name, settings)
    if failed and not found:
        raise typer.Exit(1)
    name = f"{recipe.name.removesuffix(_SUFFIX)}{_SUFFIX}"  # its runs get a folder of their own
    return recipe.model_copy(update={"name": name, "searched": searched})
