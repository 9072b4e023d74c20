"""Recipes and their values as TOML."""

from __future__ import annotations

import json
from typing import Any

from covon_avalanche.experiment.recipe import Recipe


def recipe_text(recipe: Recipe, comments: dict[str, str]) -> str:
    """A recipe as TOML.

    :param comments: behind the tables of strategies, by name.
    """
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    strategies, _ = data.pop("strategies"), data.pop("search", None)
    lines = [f"{k} = {toml_value(v)}" for k, v in data.items() if not isinstance(v, dict)]
    tables = {f"[{k}]": v for k, v in data.items() if isinstance(v, dict)}
    for name, settings in strategies.items():
        comment = f"  # {comments[name]}" if name in comments else ""
        tables[f"[strategies.{_key(name)}]{comment}"] = settings
    for title, table in tables.items():
        lines += ["", title, *_pairs(table)]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A number, text, list or table on one line; what is not set is left out of tables."""
    if isinstance(value, dict):
        return f"{{ {', '.join(_pairs(value))} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return _text(value)


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{_key(k)} = {toml_value(v)}" for k, v in table.items() if v is not None]


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _text(name)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
