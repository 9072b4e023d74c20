"""``covon search``."""

from __future__ import annotations

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
from covon_avalanche.experiment.recipe import Recipe, RecipeError, choose, load_recipe, recipe_text
from covon_avalanche.experiment.run_folder import error_sentence, is_bad_input
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import default_processes, worker_pool

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
    """Choose hyperparameters on validation images, with the same number of trials per strategy.

    Trials are kept in FOLDER/trials.journal: the same command resumes after an interruption, and
    several machines that share the folder work on the same trials. The best settings go
    to FOLDER/best.toml, a recipe. Ranges are in the recipe's \\[search.STRATEGY] tables, such as
    lr = { low = 1e-4, high = 1e-1 }; without one, from a tenth to ten times each positive
    setting on an unbounded scale (lr, weight_decay, ess, strength and others). A strategy
    without any keeps its settings.
    """
    need("optuna", "covon search", "'covon_avalanche[search]'")
    changes = list(settings or ())
    given = choose(load_recipe(recipe, changes), epochs=epochs)
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
    journal = folder / "trials.journal"
    from covon_avalanche.experiment.search import Search, space_of

    searches = {
        name: Search(held_out, name, journal, seed)
        for name in held_out.strategies
        if space_of(held_out, name)
    }
    wanted = [searches[name] for name in chosen.strategies if name in searches]
    workers = jobs or default_processes(chosen.device)
    _run_trials(wanted, trials, RunOptions(dataset_root=dataset_root), workers)
    best, comments = _best(given, searches, wanted, trials)
    write_atomically(folder / "best.toml", recipe_text(best, comments))
    typer.echo(f"{folder}/best.toml: covon run {folder}/best.toml")


def _run_trials(searches: list[Search], trials: int, options: RunOptions, workers: int) -> None:
    """Search for strategies in parallel; several processes may work on the same one."""
    per_strategy = min(trials, max(1, -(-workers // max(1, len(searches)))))
    shares = [search for search in searches for _ in range(per_strategy)]
    try:
        with worker_pool(workers) as pool:
            futures = [pool.submit(_work, search, trials, options) for search in shares]
            for future in as_completed(futures):
                if (failure := future.result()) is not None:
                    sentence, bad_input = failure
                    fail(sentence, BAD_INPUT if bad_input else 1)
    except KeyboardInterrupt:
        typer.echo("Interrupted; the same command resumes from here.")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenProcessPool:
        fail(
            "a process was killed, perhaps out of memory; the trials in "
            f"{searches[0].journal} are kept, and the same command resumes the search",
            status=1,
        )


def _work(search: Search, trials: int, options: RunOptions) -> tuple[str, bool] | None:
    """Run the search in a worker; return the error, if any."""
    try:
        warnings.filterwarnings("ignore")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        search.run(trials, options, notify=partial(print, flush=True))
    except (Exception, SystemExit) as error:
        return error_sentence(error), is_bad_input(error)
    return None


def _best(
    recipe: Recipe, searches: dict[str, Search], wanted: list[Search], trials: int
) -> tuple[Recipe, dict[str, str]]:
    """The recipe with the best settings of all strategies searched so far, and comments."""
    import optuna

    from covon_avalanche.experiment.search import with_settings

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    comments = {}
    for name in recipe.strategies:
        search = searches.get(name)
        if search is None:
            comments[name] = "nothing to search"
        else:
            try:
                settings, value = search.best(trials)
            except RecipeError:
                if search in wanted:
                    raise
                continue
            recipe = with_settings(recipe, name, settings)
            comments[name] = f"validation A_T {100 * value:.2f} %"
        typer.echo(f"{name}: {comments[name]}")
    found = {name: recipe.strategies[name] for name in comments}
    return recipe.model_copy(update={"strategies": found, "searched": list(found)}), comments
