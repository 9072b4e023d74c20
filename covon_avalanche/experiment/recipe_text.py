"""Recipes and their values as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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


def toml_value(value: Any) -> str:
    """A number, text, list or table on one line."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {toml_value(v)}" for key, v in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
