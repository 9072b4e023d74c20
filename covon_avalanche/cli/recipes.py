"""``covon recipes``."""

from __future__ import annotations

import typer

from covon_avalanche.experiment.recipe import load_recipe, shipped_recipes


def recipes() -> None:
    """List the recipes that come with the package."""
    for name in shipped_recipes():
        typer.echo(f"{name}: {load_recipe(name).title}")
