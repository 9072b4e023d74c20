"""Recipes: what to compare, as data. Nothing here imports torch."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.experiment.data_settings import MODELS, STREAMS, Model, Stream
from covon_avalanche.experiment.registry import KINDS, Strategy
from covon_avalanche.experiment.registry.base import Count, Fraction, Seed, Table
from covon_avalanche.experiment.registry.merge_rules import RULES, MergeSettings
from covon_avalanche.experiment.result import what_is_wrong
from covon_avalanche.experiment.search_space import Searched, Space, check_space
from covon_avalanche.safe_text import Printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHIPPED = Path(__file__).parent / "recipes"
StrategyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+*-]{0,99}$")]
"""A strategy's name, and that of its folder of runs."""


def _check_device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        similar = did_you_mean(name.replace("gpu", "cuda"), ("cpu", "cuda", "mps"))
        raise ValueError(f"known are cpu, cuda, cuda:N and mps{similar}")
    return name


def _with_dots(ranges: Any) -> Any:
    """Search ranges by dotted key: ``arguments.n`` without quotation marks is a table of TOML."""
    found: dict[str, Any] = {}
    for key, value in ranges.items() if isinstance(ranges, dict) else ():
        is_table = isinstance(value, dict) and any(isinstance(v, dict) for v in value.values())
        found |= {f"{key}.{k}": v for k, v in value.items()} if is_table else {key: value}
    return found or ranges


class Recipe(Table):
    """A comparison of strategies on a stream."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
    title: Printable
    stream: Stream
    model: Model
    epochs: Count
    """Epochs per domain; for joint training, over all domains."""
    train_mb_size: Count
    eval_mb_size: Count = 1024
    final_lr_factor: Fraction = 0.01
    """The learning rate of the last epoch of a domain, relative to the first; the epochs between
    follow a cosine, a single epoch keeps the first."""
    device: Annotated[str, AfterValidator(_check_device)] = "cpu"
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """Number format of the forward and backward passes; ``bfloat16`` is torch's autocast, weights
    are float32. ``auto`` is ``bfloat16`` where the device has instructions for it; the result's
    ``machine`` says which it was."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that load images from disk."""
    posterior_samples: Annotated[int, Field(ge=0, le=10**4)] = 0
    """At the end, also evaluate CoVON and VCL with the mean prediction of posterior samples."""
    seeds: Annotated[list[Seed], Field(min_length=1)]
    """Seeds of permutations, initial weights, data order and noise."""
    strategies: Annotated[dict[StrategyName, Strategy], Field(min_length=1)]
    searched: dict[StrategyName, Searched] = Field({})
    """How a search has found the settings of strategies; reports mark the others as untuned."""
    search: dict[StrategyName, Annotated[dict[str, Space], BeforeValidator(_with_dots)]] = Field({})
    """Spaces of ``covon search``, by strategy and setting."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("seeds must be distinct")
        return seeds

    @field_validator("searched", mode="before")
    @classmethod
    def _only_names(cls, searched: Any) -> Any:
        """Recipes of earlier versions have a list of names."""
        names = isinstance(searched, list) and all(isinstance(name, str) for name in searched)
        return {name: {} for name in searched} if names else searched

    @field_validator("search")
    @classmethod
    def _of_strategies(cls, search: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = info.data.get("strategies", {})
        for name, space in search.items() if known else ():  # unless these are invalid
            if name not in known:
                similar = did_you_mean(name, known)
                names = ", ".join(known)
                raise ValueError(f"there is no strategy {name!r}; known are {names}{similar}")
            check_space(name, known[name], space)
        return search


class RecipeError(ValueError):
    """A recipe that does not exist or does not fit the schema; one sentence."""


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe by name, or any by the path of its TOML file.

    :param overrides: ``KEY=VALUE`` with dots in the key and a TOML value, instead of what the
        file says: ``strategies.covon.lr=0.02``.
    :raises RecipeError: naming the file, the key and what is wrong.
    """
    path = recipe_file(name_or_path)
    _, data = read_recipe(path)
    before = copy.deepcopy(data)
    for override in overrides:
        set_value(data, *parse_setting(override))
    _drop_searches(data, before)
    if {"name", "title", "stream"}.isdisjoint(data):
        raise RecipeError(f"{path} is not a recipe: it has no name, title and stream")
    return validate(data, f"recipe {path}")


def read_recipe(path: Path, children: Sequence[Path] = ()) -> tuple[str, dict[str, Any]]:
    """Text and data of a recipe. One that extends another is resolved: its text is generated, with
    the comments at its head.

    :param children: resolved paths of the recipes that extend it.
    :raises RecipeError: if it or the recipe that it extends cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        data: dict[str, Any] = tomllib.loads(text)
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from error
    if "extends" not in data:
        return text, data
    name, removed = data.pop("extends"), data.pop("remove", [])
    children = (*children, path.resolve())
    try:
        if not isinstance(name, str):
            raise RecipeError("must be the name or the path of a recipe")
        if (file := recipe_file(name, path.parent)).resolve() in children:
            raise RecipeError(f"recipe {file} would extend itself")
        _, parent = read_recipe(file, children)
        before = copy.deepcopy(parent)
        if not (isinstance(removed, list) and all(isinstance(key, str) for key in removed)):
            raise RecipeError(f"remove = {removed!r:.200}: must be a list of keys")
        for key in removed:
            table, last = _table_of(parent, key)
            if table.pop(last, None) is None:
                raise RecipeError(f"remove: there is no {key!r}{did_you_mean(last, table)}")
        if isinstance(search := parent.get("search"), dict):
            was, now = _kinds(parent), _kinds(data)
            gone = {k for k in now if k in was and now[k] != was[k]}
            gone |= {k for k in search if f"strategies.{k}" in removed}
            parent["search"] = {k: v for k, v in search.items() if k not in gone}
    except ValueError as error:  # also of paths that cannot be
        raise RecipeError(f"recipe {path} extends {name!r:.200}: {error}") from error
    data = _extended(parent, data)
    _drop_searches(data, before)
    head = takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    return "".join(head) + tomli_w.dumps(data), data


def _kinds(data: dict[str, Any]) -> dict[str, Any]:
    """Kinds by the names of the strategies that state one."""
    table = data.get("strategies")
    table = table if isinstance(table, dict) else {}
    return {k: v["kind"] for k, v in table.items() if isinstance(v, dict) and "kind" in v}


def _extended(parent: dict[str, Any], child: dict[str, Any], depth: int = 2) -> dict[str, Any]:
    """The parent with the child's keys, ``depth`` tables deep. A stream with another name, a model
    of another kind and a strategy of another kind replace the parent's."""
    merged = dict(parent)
    for key, value in child.items():
        old = parent.get(key)
        if depth and isinstance(old, dict) and isinstance(value, dict):
            other = [k for k in ("name", "kind") if isinstance(value.get(k, {}), str)]
            models = [cls.model_fields.keys() for cls in MODELS.values()] if key == "model" else []
            new_model = any(value.keys() & keys and not old.keys() & keys for keys in models)
            if all(value[k] == old.get(k) for k in other) and not new_model:
                value = _extended(old, value, depth - 1)
        merged[key] = value
    return merged


def _drop_searches(data: dict[str, Any], before: dict[str, Any]) -> None:
    """Remove ``searched`` of the strategies whose settings have changed, or of all if what they
    learn has; unless it has changed, too."""
    found, old = data.get("searched"), before.get("searched")
    if isinstance(found, list) and found == old:
        found = old = data["searched"] = {str(name): {} for name in found}
    tables: Any = found, old, data.get("strategies"), before.get("strategies")
    if all(isinstance(table, dict) for table in tables):
        found, old, now, then = tables
        same = _learned(data) == _learned(before)
        unchanged = {k for k in found if same and now.get(k) == then.get(k)}
        data["searched"] = {k: v for k, v in found.items() if v != old.get(k) or k in unchanged}


def _learned(data: dict[str, Any]) -> tuple[Any, ...]:
    """What settings are searched for: the stream, but not the order of its domains; and the
    training."""
    stream, training = data.get("stream"), ("model", "epochs", "train_mb_size", "final_lr_factor")
    name = stream.get("name") if isinstance(stream, dict) else stream
    return name, *map(data.get, training)


def validate(data: dict[str, Any], name: str) -> Recipe:
    """A recipe from plain data.

    :raises RecipeError: that begins with ``name``, and says which key is wrong and why.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{name}: {_sentence(error, data)}") from error


def recipe_file(name_or_path: str, folder: Path = Path()) -> Path:
    """The file of a shipped recipe, or of one given by its path from a folder; ``./NAME`` is always
    a path.

    :raises RecipeError: if there is no such recipe.
    """
    path, shipped = folder / name_or_path, shipped_recipes()
    if name_or_path in shipped:
        return _SHIPPED / f"{name_or_path}.toml"
    if path.suffix == ".toml" or path.is_file():
        return path
    files = folder.glob("*.toml")
    raise RecipeError(
        f"there is no recipe {name_or_path!r}; known are {', '.join(shipped)}, or give the path of "
        f"a .toml file{did_you_mean(name_or_path, [*shipped, *(p.name for p in files)])}"
    )


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE`` with a TOML value, or text without quotation marks.

    :raises RecipeError: if there is no key or no value.
    """
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise RecipeError(f"a setting must look like KEY=VALUE, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        is_number = re.fullmatch(r"[+-]?(\d+\.|\.\d+)", value.strip())  # which TOML does not take
        return key.strip(), float(value) if is_number else value.strip()


def set_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Put a value into nested tables, whose names the key has, with dots between them.

    :raises RecipeError: if one of them is a value.
    """
    table, last = _table_of(data, key)
    table[last] = value


def _table_of(data: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The table that has a key, and the part of the key after the last dot."""
    rest = key
    while (table := _first_key(data, rest)) != rest:
        rest = rest[len(table) + 1 :]
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise RecipeError(f"{key}: {table} is a value, not a table")
    return data, rest


def _first_key(data: dict[str, Any], dotted: str) -> str:
    """Up to the first dot, unless there is a longer key in the data: names may have dots."""
    known = [key for key in data if f"{dotted}.".startswith(f"{key}.")]
    return max(known, key=len, default=dotted.partition(".")[0])


_CHOICES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "strategies": (2, KINDS),
    "stream": (1, STREAMS),
    "model": (1, MODELS),
}
"""Where pydantic puts the name of the class that it has chosen, and the classes by that name."""
_PATTERNS = {
    "name": "use at most 100 lower-case letters, digits and -, and begin with a letter or digit",
    "implementation": "must look like MODULE:CLASS",
}


def _sentence(error: ValidationError, data: dict[str, Any]) -> str:
    """The most informative of the errors: misspelt keys first, they explain missing ones."""
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda e: order.get(e["type"], 1))
    parts = [str(part) for part in first["loc"] if part != "constrained-float"]  # of a union
    if parts[-1] == "[key]":
        return (
            f"{'.'.join(parts[:-2])}: {first['input']!r} is not a strategy name: use at most 100 "
            "letters, digits and _ . + * -, and begin with a letter or digit"
        )
    model: Any = Recipe
    position, classes = _CHOICES.get(parts[0], (len(parts), {}))
    if len(parts) > position:
        model = classes[parts.pop(position)]
        if parts[2:3] == ["schedule"]:
            model = model.model_fields["schedule"].annotation
            while arguments := get_args(model):  # list[...] | None
                model = arguments[0]
        elif parts[2:3] == ["arguments"]:
            del parts[4::2]  # each key is followed by the type of its value
        elif parts[2:3] == ["merge"]:
            classes = RULES
            model = RULES[parts.pop(3)] if len(parts) > 3 else MergeSettings
    elif parts[0] in ("search", "searched"):
        model = Space if parts[0] == "search" else Searched
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        similar = did_you_mean(parts[-1], model.model_fields)
        return f"{key}: unknown key; known are {known}{similar}"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        key += "." + {"stream": "name", "merge": "rule"}.get(parts[-1], "kind")
        if (tag := first.get("ctx", {}).get("tag")) is None:
            others = {*data["strategies"]} - {parts[-1]} if parts[:-1] == ["strategies"] else ()
            known = f"; known are {', '.join(classes)}"
            return f"{key}: is missing{did_you_mean(parts[-1], others) or known}"
        return f"{key} = {tag!r:.200}: {what_is_wrong(first)}"
    if first["type"] == "missing":
        hints = {"model.weights": '; give "default", a file, or "" for random weights'}
        return f"{key}: is missing{hints.get(key, '')}"
    what = key if isinstance(first["input"], dict) else f"{key} = {first['input']!r:.200}"
    similar = ""
    if first["type"] == "literal_error":
        similar = did_you_mean(first["input"], re.findall("'([^']+)'", first["ctx"]["expected"]))
    if first["type"] == "string_pattern_mismatch":
        return f"{what}: {_PATTERNS[parts[-1]]}"
    return f"{what}: {what_is_wrong(first)}{similar}"


def choose(
    recipe: Recipe,
    strategies: str | None = None,
    seeds: str | None = None,
    epochs: int | None = None,
) -> Recipe:
    """The recipe with some strategies, other seeds or epochs.

    :param strategies: names, separated by commas.
    :param seeds: such as ``0-4`` or ``0,3,7``.
    :param epochs: per domain; they also replace those of strategies and schedules.
    :raises RecipeError: naming what is unknown or out of range.
    """
    data = recipe.model_dump()
    if epochs is not None:
        data["epochs"] = epochs
        for own in data["strategies"].values():
            for table in (own, *(own.get("schedule") or ())):
                table["epochs"] = None
        _drop_searches(data, recipe.model_dump())
    if strategies is not None:
        names = list(dict.fromkeys(name.strip() for name in strategies.split(",")))
        unknown = [name for name in names if name not in recipe.strategies]
        if unknown:
            raise RecipeError(
                f"recipe {recipe.name} has no strategy {', '.join(map(repr, unknown))}; known are "
                f"{', '.join(recipe.strategies)}{did_you_mean(unknown[0], recipe.strategies)}"
            )
        for key in ("strategies", "search"):
            data[key] = {name: data[key][name] for name in names if name in data[key]}
    if seeds is not None:
        data["seeds"] = parse_seeds(seeds)
    return validate(data, f"recipe {recipe.name}")


def parse_seeds(text: str) -> list[int]:
    """``0-4`` or ``0,3,7``.

    :raises RecipeError: if it is something else, or empty.
    """
    seeds: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)):
            raise RecipeError(f"seeds must look like 0-4 or 0,3,7, got {text!r:.200}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < 10**4:
            size = "empty" if last < first else "of more than 10000"
            raise RecipeError(f"the range of seeds {part.strip()!r} is {size}")
        seeds += range(first, last + 1)
    return seeds


def recipe_text(recipe: Recipe) -> str:
    """A recipe as TOML, without its search spaces and hashes of source."""
    excluded: Any = {"search": True, "strategies": {"__all__": {"source"}}}
    data = recipe.model_dump(
        mode="json", exclude=excluded, exclude_defaults=True, exclude_none=True
    )
    return tomli_w.dumps(data)
