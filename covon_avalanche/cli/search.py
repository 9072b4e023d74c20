"""``covon search``."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.cli.options import (
    INTERRUPTED,
    DatasetRoot,
    Epochs,
    Jobs,
    RecipeName,
    Settings,
    Strategies,
    expanded,
    fail,
    joined,
    missing_sentence,
)
from covon_avalanche.cli.progress import GridProgress
from covon_avalanche.cli.show import print_searches
from covon_avalanche.experiment.recipe import Recipe, RecipeError, choose, load_recipe, recipe_text
from covon_avalanche.experiment.run_folder import other_data
from covon_avalanche.experiment.search import (
    Search,
    is_search,
    run_searches,
    searches_in,
    space_of,
    trials_in,
    with_settings,
)
from covon_avalanche.experiment.search_space import Searched
from covon_avalanche.experiment.worker_pool import default_processes
from covon_avalanche.safe_text import csv_text

_HELD_OUT = 0.2  # of the training images, where the recipe holds out none
_SUFFIX = "-searched"


def search(
    recipe: RecipeName,
    strategies: Strategies = None,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Trials per strategy.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the trials only.")] = 1000,
    validation_size: Annotated[
        float | None, typer.Option(metavar="SIZE", min=0, help="Held out: a number or share.")
    ] = None,
    epochs: Epochs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", callback=expanded, help="Trials. \\[default: searches/RECIPE]"
        ),
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

    Trials are runs in FOLDER/STRATEGY: the same command resumes after an interruption, and several
    machines that share the folder work on the same trials; `covon status FOLDER` shows them. The
    best settings go to FOLDER/best.toml, a recipe.
    """
    if validation_size == 0:
        fail("--validation-size 0: a search chooses settings on images that are held out")
    changes = list(settings or ())
    given = choose(load_recipe(recipe, changes), epochs=epochs)
    if not validation_size and not given.stream.validation_size:
        validation_size = _HELD_OUT
        typer.echo(f"{given.name} holds out no images: using --validation-size {_HELD_OUT}")
    if validation_size:
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
    if not is_search(folder) and any(folder.glob("*/seed-*")):
        fail(f"{folder} has runs of `covon run`: choose another --out")
    names = [name for name in held_out.strategies if space_of(held_out, name)]
    wanted = [
        Search(held_out, name, folder, seed, trials, dataset_root)
        for name in chosen.strategies
        if name in names
    ]
    if not wanted:
        fail(f"{', '.join(chosen.strategies)}: nothing to search; give ranges in [search.STRATEGY]")
    if strategies and (others := [name for name in chosen.strategies if name not in names]):
        typer.echo(f"{', '.join(others)}: nothing to search")
    first = [trial for s in wanted if (trial := s.trial(s.plan()[0] or {})) is not None]
    if (sentence := other_data(first)) is not None:
        fail(sentence)
    folder.mkdir(parents=True, exist_ok=True)
    for search in wanted:
        search.store()
    workers = jobs or default_processes(chosen.device)
    progress = GridProgress(Console(), sum(search.left() for search in wanted))
    if (status := progress.follow(partial(run_searches, wanted, processes=workers))) == INTERRUPTED:
        raise typer.Exit(status)
    searches = [
        Search(held_out, search.strategy, folder, search.seed, search.number, dataset_root)
        for search in searches_in(folder)
        if search.strategy in names
    ]
    best = _best(given, searches, [search.strategy for search in wanted], status)
    print_searches(folder)  # first, for the disk may be full
    write_atomically(folder / "best.toml", recipe_text(best))
    write_atomically(folder / "trials.csv", csv_text(trials_in(folder)))
    root = [] if dataset_root is None else ["--dataset-root", str(dataset_root)]
    command = shlex.join(["covon", "run", f"{folder}/best.toml", *root])
    typer.echo(f"{folder}/best.toml: {command}")
    raise typer.Exit(status)


def _best(recipe: Recipe, searches: list[Search], wanted: list[str], status: int) -> Recipe:
    """The recipe with the best settings of all strategies searched so far; the others keep what the
    recipe says about their search.

    :param wanted: the strategies that this command has searched.
    :param status: not 0 if trials have failed, and the reasons were printed.
    """
    unsearched = (name for name in recipe.strategies if not space_of(recipe, name))
    before = {k: found for k, found in recipe.searched.items() if k in recipe.strategies}
    searched = before | {name: Searched(trials=0) for name in unsearched}
    found = False
    for search in searches:
        name = search.strategy
        try:
            settings, searched[name] = search.best()
        except RecipeError as error:
            if not status:
                typer.echo(f"covon: {error}; {name} keeps the recipe's settings", err=True)
            continue
        found = found or name in wanted
        recipe = with_settings(recipe, name, settings)
    if not found:
        raise typer.Exit(status or 1)
    name = f"{recipe.name.removesuffix(_SUFFIX)[:90]}{_SUFFIX}"  # its runs get their own folder
    return recipe.model_copy(update={"name": name, "searched": searched})
