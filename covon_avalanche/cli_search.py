"""``covon search``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli_errors import fail
from covon_avalanche.cores import runs_at_a_time
from covon_avalanche.experiment.grid import end_with_parent, sentence_of
from covon_avalanche.experiment.recipe import Recipe, RecipeError, choose, load_recipe


def search(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a .toml file.")],
    strategies: Annotated[
        str | None, typer.Option(help="Some of the recipe's strategies only, e.g. covon,ewc-star.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="For each strategy, in all.")] = 20,
    seed: Annotated[
        int, typer.Option(min=0, help="Of permutations and weights: none that you will report.")
    ] = 1000,
    validation_size: Annotated[
        float | None,
        typer.Option(min=0, help="Images, or below 1 a fraction of them, instead of the recipe's."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs per domain instead of the recipe's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the trials and the best recipe. \\[default: searches/RECIPE]"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at a time. \\[default: one per core, one on a GPU]"),
    ] = None,
    dataset_root: Annotated[
        Path | None, typer.Option(help="Where image data lies or is downloaded to.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="E.g. stream.limit=20; repeatable."),
    ] = None,
) -> None:
    """Choose hyperparameters on validation images, with as many trials for every strategy.

    Trials are kept in FOLDER/trials.journal: the same command goes on after an interruption, and
    on several machines that share the folder all work on the same trials. The best settings go
    to FOLDER/best.toml, a recipe. Ranges are in the recipe's \\[search.STRATEGY] tables, such as
    lr = { low = 1e-4, high = 1e-1 }; without one, from a tenth to ten times each positive setting
    on a continuous scale without end (lr, weight_decay, ess, strength and the like).
    """
    if find_spec("optuna") is None:
        fail("covon search needs optuna: pip install 'covon_avalanche[search]'")
    try:
        given = choose(load_recipe(recipe, settings or ()), None, None, epochs)
        chosen = choose(given, strategies)
    except RecipeError as error:
        fail(str(error))
    if seed in chosen.seeds:
        typer.echo(
            f"covon: --seed {seed} is one of the recipe's seeds: settings chosen with it look "
            "better in its report than they are",
            err=True,
        )
    folder = out or Path("searches") / chosen.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"the folder {folder} cannot be made: {error.strerror}")
    root = None if dataset_root is None else str(dataset_root)
    options: dict[str, Any] = {"trials": trials, "seed": seed, "dataset_root": root}
    whole = validation_size is not None and validation_size >= 1
    options["validation_size"] = round(validation_size or 0) if whole else validation_size
    workers = jobs or runs_at_a_time(chosen.device)
    context = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(workers, context, initializer=end_with_parent)
    with _told_when_stopped(folder), processes as pool:
        shares = [name for name in chosen.strategies for _ in range(_share(workers, chosen))]
        futures = [
            pool.submit(_work, chosen, name, folder / "trials.journal", options) for name in shares
        ]
        for future in as_completed(futures):
            if (stopped_by := future.result()) is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                _fail(*stopped_by)
    try:
        _write_best(given, list(chosen.strategies), folder, options)
    except RecipeError as error:
        fail(str(error))


@contextmanager
def _told_when_stopped(folder: Path) -> Iterator[None]:
    """One sentence when Ctrl-C or the death of a process ends a search."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Interrupted; the same command goes on from here.")
        raise typer.Exit(130) from None
    except BrokenProcessPool:
        typer.echo(
            "covon: a process was killed, perhaps for want of memory; the trials in "
            f"{folder}/trials.journal are kept, and the same command goes on from here",
            err=True,
        )
        raise typer.Exit(1) from None


def _share(workers: int, recipe: Recipe) -> int:
    """Processes that work on the same strategy, so that none is idle where there are few."""
    return max(1, -(-workers // len(recipe.strategies)))


def _fail(sentence: str, bad_input: bool) -> NoReturn:
    if bad_input:
        fail(sentence)
    typer.echo(f"covon: {sentence}", err=True)
    raise typer.Exit(1)


def _work(
    recipe: Recipe, strategy: str, journal: Path, options: dict[str, Any]
) -> tuple[str, bool] | None:
    """Search; what stopped it, see ``sentence_of``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent where another was killed
    try:
        _search(recipe, strategy, journal, options)
    except KeyboardInterrupt:
        os._exit(130)  # and takes no other strategy
    except (Exception, SystemExit) as error:
        return sentence_of(error)
    return None


def _search(recipe: Recipe, strategy: str, journal: Path, options: dict[str, Any]) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    import optuna
    import torch

    import covon_avalanche.experiment.run  # noqa: F401 -- Ctrl-C may be lost while it is read
    from covon_avalanche.experiment.searching import search_strategy

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search_strategy(recipe, strategy, journal, notify=_say, **options)


def _say(line: str) -> None:
    print(line, flush=True, file=sys.stdout)


def _write_best(recipe: Recipe, searched: list[str], folder: Path, options: dict[str, Any]) -> None:
    """The best settings of the strategies searched now, and of those with trials from before."""
    import optuna

    from covon_avalanche.experiment.recipe_text import recipe_text
    from covon_avalanche.experiment.searching import best_settings, with_settings

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal, best, comments = folder / "trials.journal", recipe, {}
    which = {key: options[key] for key in ("trials", "seed", "validation_size")}
    for name in recipe.strategies:
        try:
            settings, value = best_settings(journal, recipe, name, **which)
        except RecipeError:
            if name in searched:
                raise
            continue
        best = with_settings(best, name, settings)
        comments[name] = f"validation A_T {100 * value:.2f} %"
        typer.echo(f"{name}: {comments[name]}")
    best = best.model_copy(update={"strategies": {n: best.strategies[n] for n in comments}})
    try:
        write_atomically(folder / "best.toml", recipe_text(best, comments))
    except OSError as error:
        fail(f"best.toml cannot be written to {folder}: {error.strerror}")
    typer.echo(f"{folder}/best.toml: covon run {folder}/best.toml")
