"""Recipes as TOML."""

from __future__ import annotations

from collections.abc import Mapping

import tomli_w

from covon_avalanche.experiment.recipe import Recipe


def recipe_text(recipe: Recipe, comments: Mapping[str, str]) -> str:
    """A recipe as TOML, without its search spaces.

    :param comments: on strategies, by name, for the head of the file.
    """
    head = "".join(f"# {name}: {comment}\n" for name, comment in comments.items())
    data = recipe.model_dump(
        mode="json", exclude={"search"}, exclude_defaults=True, exclude_none=True
    )
    return head + tomli_w.dumps(data)
